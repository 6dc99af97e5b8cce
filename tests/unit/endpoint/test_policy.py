"""What is enforced while the agent runs, and what endpoints make of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from cells.endpoint import (
    ALLOW_ALL,
    ALLOW_LOCALHOST,
    Aftercare,
    Endpoint,
    Endpoints,
    Enforced,
    Enforcement,
    PolicyEnforcement,
    PolicySettings,
    Regenerations,
    State,
)
from cells.endpoint.policy import Localhost, NodePolicy
from cells.maps import PolicyEntry, PolicyKey
from lifecycle import Duration, Hive, Jobs, config, invoke, module, provide, supply
from tests.unit.endpoint.fakes import Node, request

pytestmark = pytest.mark.anyio

DEFAULT = Enforced(Enforcement.DEFAULT, source_ip_verification=True)
ALWAYS = Enforced(Enforcement.ALWAYS, source_ip_verification=True)
NEVER = Enforced(Enforcement.NEVER, source_ip_verification=True)
BY_HAND = PolicyKey(identity=256, egress=True)


class Timers:
    """Jobs that keep the timer instead of running it."""

    def __init__(self) -> None:
        self.work: dict[str, tuple[Callable[[], Awaitable[object]], float]] = {}

    def timer(self, name: str, work: Callable[[], Awaitable[object]], interval: float) -> None:
        self.work[name] = work, interval


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def changes(node: Node) -> AsyncIterator[PolicyEnforcement]:
    def needed(_: PolicyEnforcement) -> None: ...

    cell = module(
        "endpoint",
        "enforcement over fakes",
        supply(node.policy, NodePolicy),
        supply(node.endpoints, Endpoints),
        supply(node.aftercare, Aftercare),
        config(PolicySettings),
        provide(Regenerations, PolicyEnforcement),
        invoke(needed),
    )
    async with Hive(cell).started() as hive:
        yield hive.get(PolicyEnforcement)


def rules(node: Node) -> list[object]:
    return [slot.entries for slot in node.kernel.policies.values()]


async def test_always_denies_all_in_every_endpoint_and_default_allows_it_again(
    node: Node, changes: PolicyEnforcement
) -> None:
    made = [node.endpoints.create(request(number)) for number in (1, 2)]
    assert rules(node) == [ALLOW_ALL, ALLOW_ALL]
    assert await changes.change(ALWAYS) == []
    assert rules(node) == [{}, {}]
    found = node.endpoints.all()
    assert [(e.state, e.policy_revision, e.enforced) for e in found] == [(State.READY, 2, True)] * 2
    assert await changes.change(NEVER) == await changes.change(DEFAULT) == []
    assert rules(node) == [ALLOW_ALL, ALLOW_ALL]
    assert [(e.id, e.enforced, e.policy_revision) for e in node.endpoints.all()] == [
        (e.id, False, 4) for e in made
    ]


async def test_a_new_endpoint_is_made_as_is_enforced_now(node: Node, changes: PolicyEnforcement) -> None:
    await changes.change(ALWAYS)
    endpoint = node.endpoints.create(request(1))
    assert rules(node) == [{}]
    assert (endpoint.enforced, endpoint.policy_revision) == (True, 2)


async def test_what_is_enforced_already_changes_nothing(node: Node, changes: PolicyEnforcement) -> None:
    node.endpoints.create(request(1))
    before, log = list(node.kernel.steps), node.endpoints.status(1).entries()
    assert await changes.change(DEFAULT) == []
    assert node.kernel.steps == before
    assert node.endpoints.status(1).entries() == log
    assert node.policy.revision == 1


async def test_the_log_of_an_endpoint_tells_of_the_change(node: Node, changes: PolicyEnforcement) -> None:
    node.endpoints.create(request(1))
    await changes.change(ALWAYS)
    newest = [(entry.state, entry.message) for entry in node.endpoints.status(1).entries()[:4]]
    reason = "agent configuration update"
    assert list(reversed(newest)) == [
        (State.WAITING_TO_REGENERATE, f"Triggering endpoint regeneration due to {reason}"),
        (State.REGENERATING, "Starting endpoint regeneration"),
        (State.REGENERATING, f"Successfully regenerated endpoint program (Reason: {reason})"),
        (State.READY, "Completed endpoint regeneration with no pending regeneration requests"),
    ]


async def test_a_map_that_refuses_fails_its_endpoint_and_is_tried_again(
    node: Node, changes: PolicyEnforcement
) -> None:
    node.endpoints.create(request(1))
    node.kernel.refuse = "fill"
    assert await changes.change(ALWAYS) == [1]
    (endpoint,) = node.endpoints.all()
    assert node.endpoints.shown_state(endpoint) is State.NOT_READY
    assert (endpoint.enforced, endpoint.policy_revision) == (False, 1)
    node.kernel.refuse = ""
    assert node.aftercare.recoveries == [1]
    assert node.build(1) == ""
    assert rules(node) == [{}]


async def test_source_addresses_are_verified_unless_the_node_or_the_endpoint_says_otherwise(
    node: Node, changes: PolicyEnforcement
) -> None:
    node.endpoints.create(request(1))
    exempt = node.endpoints.create(request(2))
    node.endpoints.delete(exempt)
    assert node.kernel.any_source[101] is False
    await changes.change(Enforced(Enforcement.DEFAULT, source_ip_verification=False))
    assert node.kernel.any_source[101] is True
    assert rules(node) == [ALLOW_ALL]


async def test_whole_maps_are_compared_now_and_then_and_put_right(node: Node) -> None:
    timers = Timers()
    settings = PolicySettings(policy_map_full_reconciliation_interval=Duration(0))
    jobs = cast("Jobs", timers)
    unasked = Regenerations.__new__(Regenerations)
    PolicyEnforcement(settings, node.policy, node.endpoints, unasked, jobs, structlog.get_logger())
    ((work, interval),) = timers.work.values()
    assert interval == float("inf")
    node.endpoints.create(request(1))
    slot = node.kernel.policies[1]
    slot.entries = {**ALLOW_ALL, BY_HAND: PolicyEntry()}
    await work()
    assert slot.entries == ALLOW_ALL


@pytest.mark.parametrize(
    ("mode", "localhost", "entries"),
    [
        (Enforcement.ALWAYS, Localhost.ALWAYS, ALLOW_LOCALHOST),
        (Enforcement.ALWAYS, Localhost.AUTO, {}),
        (Enforcement.ALWAYS, Localhost.POLICY, {}),
        (Enforcement.DEFAULT, Localhost.POLICY, ALLOW_ALL),
        (Enforcement.NEVER, Localhost.ALWAYS, ALLOW_ALL),
    ],
)
def test_what_belongs_in_a_policy_map(mode: Enforcement, localhost: Localhost, entries: object) -> None:
    policy = NodePolicy(PolicySettings(enable_policy=mode, allow_localhost=localhost))
    assert policy.entries() == entries


async def test_an_endpoint_deleted_in_the_middle_of_a_change_is_no_failure(
    node: Node, changes: PolicyEnforcement, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Endpoint] = [node.endpoints.create(request(number)) for number in (1, 2)]
    fill = node.kernel.fill_policy

    def deleting(policy: Any, entries: Any) -> None:
        fill(policy, entries)
        if policy.endpoint_id == 1:
            node.endpoints.delete(made[1])

    monkeypatch.setattr(node.kernel, "fill_policy", deleting)
    assert await changes.change(ALWAYS) == []
