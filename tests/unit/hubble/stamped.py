"""Origin and timestamp of parsed events."""

from __future__ import annotations

from cells.hubble.parser import (
    FlowOrigin,
    Stamp,
)
from cells.hubble.scalars import parse_rfc3339

STAMP = Stamp(parse_rfc3339("2023-11-14T22:13:20.123456789Z"), "6ba7b810-9dad-41d1-80b4-00c04fd430c8")
ORIGIN = FlowOrigin("default/node1")
