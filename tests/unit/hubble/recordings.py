"""Recordings of Cilium's Hubble: the cases of one file, and the other contents of the file."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tests.support.recordings import recordings

DATA = recordings("hubble")


@cache
def recording(name: str) -> dict[str, Any]:
    """Return the whole file."""
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return loaded


def recorded(name: str) -> list[dict[str, Any]]:
    """Return its cases."""
    cases: list[dict[str, Any]] = recording(name)["cases"]
    return cases
