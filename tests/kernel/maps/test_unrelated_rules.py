"""Frequent changes of unrelated rules disturb no flow of an endpoint."""

from __future__ import annotations

import pytest

from tests.bench.policy_maps import Node, node, rule

pytestmark = pytest.mark.kernel
CHANGES = 1000


def epochs(at: Node) -> dict[int, int]:
    """By endpoint: what flows' remembered verdicts hold under."""
    return {
        number: int.from_bytes(at.maps.epochs.lookup(number.to_bytes(4, "little")) or b"", "little")
        for number in at.maps.slots
    }


def test_a_thousand_changes_for_one_endpoint_leave_the_others_flows_alone(in_node: None) -> None:
    with node(100, 100) as at:
        before, entries = epochs(at), at.entries()
        concerned = at.maps.slots[1]
        for turn in range(CHANGES):
            one = rule(0)  # of the endpoint with the first identity
            one["metadata"]["name"] = "often"
            one["spec"]["ingress"][0]["toPorts"] = [
                {"ports": [{"port": str(1 + turn % 2), "protocol": "UDP"}]}
            ]
            at.apply(one)
        after = epochs(at)
        assert {number for number in after if after[number] != before[number]} == {concerned.endpoint_id}
        assert after[1] - before[1] >= CHANGES - 1
        assert all(at.policies.status(number).revision == at.world.revision for number in at.maps.slots)
        assert at.entries() > entries
