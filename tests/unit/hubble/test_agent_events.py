"""Events of the agent become the agent events of Cilium's Hubble."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cells.hubble.codec import to_json
from cells.hubble.notifications import (
    AgentStarted,
    EndpointChanged,
    EndpointRegenerated,
    PolicyChanged,
    PrefixChanged,
    ServiceDeleted,
    ServiceUpserted,
)
from cells.hubble.parser.node_events import agent_event
from tests.unit.hubble.recordings import recorded

TYPES: dict[str, type[msgspec.Struct]] = {
    "api.TimeNotification": AgentStarted,
    "api.PolicyUpdateNotification": PolicyChanged,
    "api.EndpointRegenNotification": EndpointRegenerated,
    "api.EndpointNotification": EndpointChanged,
    "api.IPCacheNotification": PrefixChanged,
    "api.ServiceUpsertNotification": ServiceUpserted,
    "api.ServiceDeleteNotification": ServiceDeleted,
}


@pytest.mark.parametrize(
    "case",
    [case for case in recorded("parser_agent") if "notification_go_type" in case],
    ids=lambda case: case["name"],
)
def test_a_notification_becomes_the_recorded_event(case: dict[str, Any]) -> None:
    body, kind = case["notification"], TYPES.get(case["notification_go_type"])
    notification = body if kind is None else msgspec.convert(body, kind)
    assert {"agent_event": to_json(agent_event(case["agent_type"], notification))} == case["result"]
