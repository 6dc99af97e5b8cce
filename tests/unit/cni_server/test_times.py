"""Durations of CNI calls as metrics, by command and result."""

from __future__ import annotations

import pytest

from tests.unit.cni_server.harness import Harness

pytestmark = pytest.mark.anyio


async def test_calls_are_counted_by_command_and_outcome(served: Harness) -> None:
    await served.call("ADD")
    await served.call("ADD", "cid2", pod="pod2")
    await served.call("DEL")
    served.node.refuse = {"create endpoint"}
    assert (await served.call("ADD", "cid3", pod="pod3")).code == 1
    assert (await served.call("GC", pod=None)).code == 1
    (family,) = served.times.families()
    assert family.name == "hive_cni_call_seconds"
    counts = {what: durations.count for what, durations in served.times.durations.items()}
    assert counts == {
        ("ADD", "success"): 2,
        ("DEL", "success"): 1,
        ("ADD", "fail"): 1,
        ("GC", "fail"): 1,
    }
    assert all(0 < durations.sum < 60 for durations in served.times.durations.values())
