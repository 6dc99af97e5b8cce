"""A Hubble ring that contains only the flows that a test adds."""

from __future__ import annotations

import time

from cells.hubble.hubble import Hubble
from cells.hubble.observer import FlowObserver
from cells.hubble.parser import FlowOrigin, Parser
from cells.observe.events import Sample
from tests.unit.hubble.recordings import recording
from tests.unit.hubble.worlds import world


class HoldingHubble(Hubble):
    """A ring without event sources."""

    def __init__(self) -> None:
        origin = FlowOrigin("default/node1")
        self.held = FlowObserver(4095, origin, Parser(origin), "cilium v1.17.0")

    @property
    def observer(self) -> FlowObserver:
        return self.held

    def drop(self) -> None:
        """Add the drop of a known pod's packet, now."""
        data = bytes.fromhex(recording("pipeline")["perf_events"]["drop"])
        self.held.add([(Sample(1, data), world("main"))], time.time_ns())
