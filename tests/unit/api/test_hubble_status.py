"""What the API reports of Hubble's ring."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cells.api.operations.status import StatusFacts, hubble_status
from cells.api.operations.status_sections import flows
from cells.hubble.hubble import Hubble
from cells.hubble.metrics.server import HubbleMetrics
from cells.hubble.observer import FlowObserver
from cells.hubble.parser import FlowOrigin, Parser
from cells.hubble.rpc.server import HubbleServer
from lifecycle.testing import fake


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (60, "1m0s"), (3600, "1h0m0s"), (90061, "25h1m1s")]
)
def test_the_uptime_is_written_as_go_does(seconds: int, text: str) -> None:
    observer = hubble_status(1, 7, 9, seconds * 1_000_000_000 + 999, metrics=False).observer
    assert observer is not None
    assert observer.uptime == text


@pytest.mark.parametrize("metrics", [True, False])
def test_the_state_is_a_warning_until_relays_are_served(metrics: bool) -> None:
    origin = FlowOrigin("node1")
    observer = FlowObserver(7, origin, Parser(origin), "cilium v1.17.0")
    hubble, counts = fake(Hubble, observer=observer), fake(HubbleMetrics, served=metrics)

    def shown(*, ready: bool) -> dict[str, Any]:
        facts = fake(StatusFacts)
        flows(hubble, fake(HubbleServer, ready=ready), counts).fill(facts)
        found: dict[str, Any] = msgspec.to_builtins(facts.hubble)
        return found

    assert shown(ready=False) == {"state": "Warning", "msg": "Server not initialized"}
    served = shown(ready=True)
    assert served["state"] == "Ok"
    assert served["observer"]["max-flows"] == 7
    assert served["metrics"] == {"state": "Ok" if metrics else "Disabled"}
