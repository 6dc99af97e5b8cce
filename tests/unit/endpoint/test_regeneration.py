"""The regeneration queue: order, merged requests, failures, waiting."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from cells.cluster.identity.identities import Identities
from cells.endpoint import (
    Endpoint,
    EndpointMaps,
    Endpoints,
    RegenerationLevel,
    RegenerationRecovery,
    Regenerations,
    State,
)
from cells.observe.controllers import Controllers
from cells.policy.maps import EndpointPolicies
from lifecycle import Hive, invoke, module, provide, supply
from lifecycle.testing import eventually
from tests.unit.endpoint.fakes import Node, request

pytestmark = pytest.mark.anyio


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def hive(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hive]:
    monkeypatch.setattr("cells.endpoint.creation.BACKOFF", 0.001)

    def needed(_: Regenerations) -> None: ...

    cell = module(
        "endpoint",
        "regeneration over fakes",
        supply(node.kernel, EndpointMaps),
        supply(node.endpoints, Endpoints),
        supply(node.identities, Identities),
        supply(node.policies, EndpointPolicies),
        provide(Controllers, RegenerationRecovery, Regenerations),
        invoke(needed),
    )
    async with Hive(cell).started() as hive:
        yield hive


def messages(node: Node, endpoint_id: int) -> list[str]:
    return [entry.message for entry in node.endpoints.status(endpoint_id).entries()]


async def test_an_endpoint_waits_and_is_built_in_its_turn(node: Node, hive: Hive) -> None:
    queue = hive.get(Regenerations)
    made = [node.create(request(number)) for number in (1, 2)]
    asked = [queue.request(each.id, RegenerationLevel.DATAPATH, "a reason") for each in reversed(made)]
    assert queue.waiting == (2, 1)
    assert [each.state for each in node.endpoints.all()] == [State.WAITING_TO_REGENERATE] * 2
    assert [await each.result() for each in asked] == ["", ""]
    assert [each.state for each in node.endpoints.all()] == [State.READY] * 2
    assert node.kernel.attached == [101, 102, 102, 101]
    assert len(queue.waiting) == 0


async def test_waiting_regenerations_merge_with_all_reasons_and_the_higher_level(
    node: Node, hive: Hive
) -> None:
    queue = hive.get(Regenerations)
    node.create(request(1))
    one = queue.request(1, RegenerationLevel.POLICY, "one")
    assert queue.request(1, RegenerationLevel.DATAPATH, "two") is one
    assert queue.request(1, RegenerationLevel.POLICY, "one") is one
    assert await one.result() == ""
    assert node.kernel.attached == [101, 101], "the level of policy alone attaches nothing"
    assert "Successfully regenerated endpoint program (Reason: one, two)" in messages(node, 1)


async def test_policy_alone_leaves_the_program_as_it_is(node: Node, hive: Hive) -> None:
    node.create(request(1))
    assert await hive.get(Regenerations).request(1, RegenerationLevel.POLICY, "policy").result() == ""
    assert node.kernel.attached == [101]


async def test_a_failed_build_is_tried_until_it_works(node: Node, hive: Hive) -> None:
    node.create(request(1))
    node.kernel.refuse = "put_lxc"
    assert await hive.get(Regenerations).request(1, RegenerationLevel.DATAPATH, "a reason").result() != ""
    tries = node.endpoints.builds.failed
    await eventually(lambda: node.endpoints.builds.failed >= tries + 2)
    (failing,) = hive.get(Controllers).of("endpoint-1")
    assert failing.failures_in_a_row > 0
    assert failing.last_error == "regeneration recovery failed: [Errno 12] no put_lxc today"
    (endpoint,) = node.endpoints.all()
    assert node.endpoints.shown_state(endpoint) is State.NOT_READY
    node.kernel.refuse = ""
    await eventually(lambda: hive.get(Controllers).of("endpoint-1")[0].successes)
    (endpoint,) = node.endpoints.all()
    assert node.endpoints.shown_state(endpoint) is State.READY
    assert "Triggering endpoint regeneration due to retrying regeneration" in messages(node, 1)


async def test_a_build_that_crashes_is_tried_again_and_keeps_no_other_from_being_built(
    node: Node, hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = hive.get(Regenerations)
    for number in (1, 2):
        node.create(request(number))
    put = node.kernel.put_config

    def crash(endpoint: Endpoint, *, any_source: bool) -> None:
        if endpoint.id == 1:
            raise ValueError("an unforeseen fault")
        put(endpoint, any_source=any_source)

    monkeypatch.setattr(node.kernel, "put_config", crash)
    asked = [queue.request(number, RegenerationLevel.POLICY, "policy") for number in (1, 2)]
    with anyio.fail_after(30):
        assert [await each.result() for each in asked] == ["an unforeseen fault", ""]
        (endpoint,) = (each for each in node.endpoints.all() if each.id == 1)
        assert node.endpoints.shown_state(endpoint) in (State.NOT_READY, State.WAITING_TO_REGENERATE)
    monkeypatch.undo()
    await eventually(lambda: any(each.successes for each in hive.get(Controllers).of("endpoint-1")))
    assert {node.endpoints.shown_state(each) for each in node.endpoints.all()} == {State.READY}


async def test_a_queued_regeneration_of_a_deleted_endpoint_returns_an_error(node: Node, hive: Hive) -> None:
    queue = hive.get(Regenerations)
    endpoint = node.create(request(1))
    waiting = queue.request(1, RegenerationLevel.DATAPATH, "a reason")
    node.endpoints.delete(endpoint)
    node.kernel.pool = [1]
    node.create(request(2))
    steps = len(node.kernel.steps)
    assert await waiting.result() == "the endpoint no longer exists"
    assert len(node.kernel.steps) == steps, "the endpoint that has the number now is not built in its stead"
    assert (
        await queue.request(77, RegenerationLevel.DATAPATH, "nobody").result()
        == "the endpoint no longer exists"
    )


async def test_others_get_their_turn_between_builds(node: Node, hive: Hive) -> None:
    node.kernel.pool = list(range(1, 60))
    made = [node.create(request(number)) for number in range(1, 50)]
    asked = [hive.get(Regenerations).request(each.id, RegenerationLevel.POLICY, "policy") for each in made]
    turns = 0
    while hive.get(Regenerations).waiting:
        await anyio.lowlevel.checkpoint()
        turns += 1
    assert turns > 2
    assert {await each.result() for each in asked} == {""}
