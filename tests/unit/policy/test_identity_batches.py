"""Large identity batches yield to the event loop, with the same result as single ones."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from cells.cluster.identity.identities import Identity
from cells.policy import PolicySettings, compute
from cells.policy.control import RulePolicy
from cells.policy.maps import EndpointPolicy, NodePolicy
from cells.policy.rules import PolicyOptions
from lifecycle import Change

pytestmark = pytest.mark.anyio

CART, FIRST, COUNT = 1_000, 2_000, 200
"""The identity of the endpoint, and those of its peers."""
NAMESPACE = "k8s:io.kubernetes.pod.namespace=shop"
RULE: dict[str, Any] = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"namespace": "shop", "name": "cart"},
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "cart"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "web"}}]}],
    },
}


@pytest.fixture
def each_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "SLICE", 0.0)


@pytest.fixture
def policy() -> RulePolicy:
    policy = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions())
    policy.apply(RULE)
    policy.compute(1, CART, ("k8s:app=cart", NAMESPACE))
    return policy


def comes(number: int, role: str = "web") -> Change[int, Identity]:
    return Change(number, None, Identity(number, (f"k8s:role={role}", NAMESPACE)), 1)


def goes(number: int) -> Change[int, Identity]:
    return Change(number, None, None, 1)


def allowed(row: EndpointPolicy) -> set[int]:
    return {key.identity for key in row.entries if not key.egress and key.identity >= FIRST}


async def test_others_have_the_event_loop_between_identities(each_a_slice: None, policy: RulePolicy) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        (row,) = await policy.follow_identities([comes(FIRST + one) for one in range(COUNT)])
        assert turns >= COUNT
        rows = await policy.follow_identities([goes(FIRST + one) for one in range(COUNT)])
        assert turns >= 2 * COUNT
        tasks.cancel_scope.cancel()
    assert allowed(row) == set(range(FIRST, FIRST + COUNT))
    assert [allowed(one) for one in rows] == [set()]


async def test_rows_have_what_changes_between_identities(each_a_slice: None, policy: RulePolicy) -> None:
    """An ADD brings an identity, another endpoint goes, and rules change, all in the middle of a batch."""
    policy.compute(2, CART, ("k8s:app=cart", NAMESPACE))
    rows: list[EndpointPolicy] = []

    async def batch() -> None:
        rows.extend(await policy.follow_identities([comes(FIRST + one) for one in range(COUNT)]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batch)
        while len(allowed(policy.compute(1, CART, ("k8s:app=cart", NAMESPACE)))) < COUNT // 2:
            await anyio.lowlevel.checkpoint()
        policy.update_identities([Identity(FIRST + COUNT, ("k8s:role=web", NAMESPACE))])
        policy.forget(2)
        assert not rows
    assert [row.endpoint_id for row in rows] == [1]
    assert allowed(rows[0]) == set(range(FIRST, FIRST + COUNT + 1))


async def test_a_batch_without_effect_changes_no_policy(policy: RulePolicy) -> None:
    assert await policy.follow_identities([comes(FIRST, "db")]) == []
    assert await policy.follow_identities([comes(FIRST, "web")]) != []
    assert await policy.follow_identities([comes(FIRST, "web"), goes(FIRST + 1)]) == []
