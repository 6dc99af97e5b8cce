"""The status of the API server: its version, and resources that cannot be watched."""

from __future__ import annotations

import msgspec
import pytest

from cells.kubernetes.api_server import ServerState, Version, state_of, watched_kinds
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.core import NODES, PODS
from cells.kubernetes.sink import SourceStatus


def source(kind: str, state: str, error: str = "") -> SourceStatus:
    return msgspec.convert(
        {"kind": kind, "state": state, "objects": 0, "synced": True, "changed": 0.0, "error": error},
        SourceStatus,
    )


def test_version_as_cilium_writes_it() -> None:
    answer = b'{"major":"1","minor":"36","gitVersion":"v1.36.2","platform":"linux/amd64","x":1}'
    assert str(msgspec.json.decode(answer, type=Version)) == "1.36 (v1.36.2) [linux/amd64]"


def test_state_follows_what_is_heard() -> None:
    pods, lost = source("pods", "watching"), source("nodes", "failing", "no answer")
    assert state_of([pods, source("x", "absent")], "1.36") == ServerState("Ok", "1.36")
    assert state_of([pods, lost], "1.36") == ServerState("Warning", "nodes: no answer")
    assert state_of([lost, source("x", "absent")], "") == ServerState("Failure", "no answer")
    assert state_of([], "1.36") == ServerState("Warning", "not heard yet")


@pytest.mark.parametrize(
    ("seconds", "age"), [(0.5, "0s"), (59, "59s"), (312, "5m12s"), (3600, "1h0m0s"), (90061, "25h1m1s")]
)
def test_a_failing_watch_reports_the_age_of_its_last_event(seconds: float, age: str) -> None:
    kinds = (PODS, NODES, CILIUM_NODES)
    lost = msgspec.structs.replace(source("nodes", "failing", "no answer"), changed=1000.0)
    sources = [source("pods", "watching"), lost, source("ciliumnodes.cilium.io", "absent")]
    assert watched_kinds(kinds, sources, 1000.0 + seconds) == [
        f"core/v1::Node (last event {age} ago)",
        "core/v1::Pods",
    ]
    never = msgspec.structs.replace(lost, synced=False)
    assert watched_kinds(kinds, [never], 1000.0) == []
