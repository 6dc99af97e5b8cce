"""What is told of the API server: its version, and what cannot be followed."""

from __future__ import annotations

import msgspec

from cells.kubernetes import SourceStatus
from cells.kubernetes.source.api_server import ServerState, Version, state_of


def source(kind: str, state: str, error: str = "") -> SourceStatus:
    return msgspec.convert(
        {"kind": kind, "state": state, "objects": 0, "synced": True, "changed": 0.0, "error": error},
        SourceStatus,
    )


def test_version_as_cilium_writes_it() -> None:
    told = b'{"major":"1","minor":"36","gitVersion":"v1.36.2","platform":"linux/amd64","x":1}'
    assert str(msgspec.json.decode(told, type=Version)) == "1.36 (v1.36.2) [linux/amd64]"


def test_state_follows_what_is_heard() -> None:
    pods, lost = source("pods", "watching"), source("nodes", "failing", "no answer")
    assert state_of([pods, source("x", "absent")], "1.36") == ServerState("Ok", "1.36")
    assert state_of([pods, lost], "1.36") == ServerState("Warning", "nodes: no answer")
    assert state_of([lost, source("x", "absent")], "") == ServerState("Failure", "no answer")
    assert state_of([], "1.36") == ServerState("Warning", "not heard yet")
