"""Policy enforcement modes at runtime, and their effect on endpoints."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cells.cluster.identity.identities import Identities
from cells.endpoint import (
    Endpoint,
    Endpoints,
    Enforced,
    PolicyEnforcement,
    RegenerationRecovery,
    Regenerations,
    State,
)
from cells.policy import Enforcement
from cells.policy.maps import ALLOW_ALL, EndpointPolicies, NodePolicy, PolicyEntries
from lifecycle import Hive, invoke, module, provide, supply
from tests.unit.endpoint.fakes import Node, request

pytestmark = pytest.mark.anyio

DEFAULT = Enforced(Enforcement.DEFAULT, source_ip_verification=True)
ALWAYS = Enforced(Enforcement.ALWAYS, source_ip_verification=True)
NEVER = Enforced(Enforcement.NEVER, source_ip_verification=True)


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
        supply(node.identities, Identities),
        supply(node.policies, EndpointPolicies),
        supply(node.recovery, RegenerationRecovery),
        provide(Regenerations, PolicyEnforcement),
        invoke(needed),
    )
    async with Hive(cell).started() as hive:
        yield hive.get(PolicyEnforcement)


def realized(node: Node, endpoint: Endpoint) -> tuple[int, bool]:
    """Revision and enforcement that the endpoint's map has."""
    status = node.policies.status(endpoint.id)
    assert status.ingress_enforced == status.egress_enforced
    return status.revision, status.ingress_enforced


def rules(node: Node) -> list[object]:
    return [slot.entries for slot in node.kernel.policies.values()]


async def test_always_denies_all_in_every_endpoint_and_default_allows_it_again(
    node: Node, changes: PolicyEnforcement
) -> None:
    made = [node.create(request(number)) for number in (1, 2)]
    assert rules(node) == [ALLOW_ALL, ALLOW_ALL]
    assert await changes.change(ALWAYS) == []
    assert rules(node) == [{}, {}]
    found = node.endpoints.all()
    assert [(e.state, *realized(node, e)) for e in found] == [(State.READY, 2, True)] * 2
    assert await changes.change(NEVER) == await changes.change(DEFAULT) == []
    assert rules(node) == [ALLOW_ALL, ALLOW_ALL]
    assert [realized(node, e) for e in made] == [(4, False)] * 2


async def test_a_new_endpoint_is_made_as_is_enforced_now(node: Node, changes: PolicyEnforcement) -> None:
    await changes.change(ALWAYS)
    endpoint = node.create(request(1))
    assert rules(node) == [{}]
    assert realized(node, endpoint) == (2, True)


async def test_what_is_enforced_already_changes_nothing(node: Node, changes: PolicyEnforcement) -> None:
    node.create(request(1))
    before, log = list(node.kernel.steps), node.endpoints.status(1).entries()
    assert await changes.change(DEFAULT) == []
    assert node.kernel.steps == before
    assert node.endpoints.status(1).entries() == log
    assert node.policy.revision == 1


async def test_a_policy_change_is_in_the_status_log(node: Node, changes: PolicyEnforcement) -> None:
    node.create(request(1))
    await changes.change(ALWAYS)
    newest = [(entry.state, entry.message) for entry in node.endpoints.status(1).entries()[:4]]
    reason = "agent configuration update"
    assert list(reversed(newest)) == [
        (State.WAITING_TO_REGENERATE, f"Triggering endpoint regeneration due to {reason}"),
        (State.REGENERATING, "Starting endpoint regeneration"),
        (State.REGENERATING, f"Successfully regenerated endpoint program (Reason: {reason})"),
        (State.READY, "Completed endpoint regeneration with no pending regeneration requests"),
    ]


async def test_a_build_is_one_change_of_the_endpoints_table(node: Node) -> None:
    endpoint = node.create(request(1))
    before = node.table.revision
    assert node.build(endpoint.id) == ""
    assert [one.state for one in node.endpoints.all()] == [State.READY]
    assert node.table.revision == before + 2  # announced, then ready


async def test_a_map_that_refuses_fails_its_endpoint_and_is_tried_again(
    node: Node, changes: PolicyEnforcement
) -> None:
    node.create(request(1))
    node.kernel.refuse = "fill"
    assert await changes.change(ALWAYS) == [1]
    (endpoint,) = node.endpoints.all()
    assert node.endpoints.shown_state(endpoint) is State.NOT_READY
    assert realized(node, endpoint) == (1, False)
    assert node.policies.status(1).error == "[Errno 12] no fill today"
    node.kernel.refuse = ""
    assert node.recovery.recoveries == [1]
    assert node.build(1) == ""
    assert rules(node) == [{}]


async def test_source_addresses_are_verified_unless_node_or_endpoint_disables_it(
    node: Node, changes: PolicyEnforcement
) -> None:
    node.create(request(1))
    exempt = node.create(request(2))
    node.endpoints.delete(exempt)
    assert node.kernel.any_source[101] is False
    await changes.change(Enforced(Enforcement.DEFAULT, source_ip_verification=False))
    assert node.kernel.any_source[101] is True
    assert rules(node) == [ALLOW_ALL]


async def test_deleting_an_endpoint_during_a_change_reports_no_error(
    node: Node, changes: PolicyEnforcement, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Endpoint] = [node.create(request(number)) for number in (1, 2)]
    write = node.kernel.write

    def deleting(endpoint_id: int, entries: PolicyEntries) -> None:
        write(endpoint_id, entries)
        if endpoint_id == 1:
            node.endpoints.delete(made[1])

    monkeypatch.setattr(node.kernel, "write", deleting)
    assert await changes.change(ALWAYS) == []
