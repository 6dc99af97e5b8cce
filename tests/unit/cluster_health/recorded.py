"""Recorded responses of health.sock."""

from __future__ import annotations

import json
from typing import Any

from tests.support.recordings import recordings

DATA = recordings("health")
Json = Any


def recording(name: str) -> Json:
    return json.loads((DATA / f"{name}.json").read_text())
