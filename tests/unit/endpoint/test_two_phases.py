"""An endpoint waits for its identity and is then regenerated, or is removed completely."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path

import anyio
import msgspec
import pytest

from cells.base.labels import Label
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import INIT_LABELS, UNKNOWN
from cells.endpoint import (
    EndpointChanges,
    EndpointError,
    Endpoints,
    RegenerationLevel,
    RegenerationRecovery,
    Regenerations,
    State,
)
from cells.policy.maps import EndpointPolicies
from lifecycle import Hive, invoke, module, provide, supply
from tests.unit.endpoint.fakes import FakePods, Node, request
from tests.unit.identity.fakes import SlowAllocator

pytestmark = pytest.mark.anyio
IP = IPv4Address("10.0.1.1")
INITIAL = "Initial build on endpoint creation"


@pytest.fixture
def cluster() -> SlowAllocator:
    return SlowAllocator()


@pytest.fixture
def node(tmp_path: Path, cluster: SlowAllocator) -> Node:
    return Node(tmp_path, cluster)


@pytest.fixture
async def hive(node: Node) -> AsyncIterator[Hive]:
    def needed(_: EndpointChanges) -> None: ...

    cell = module(
        "endpoint",
        "changes over fakes",
        supply(node.recovery, RegenerationRecovery),
        supply(node.endpoints, Endpoints),
        supply(node.identities, Identities),
        supply(node.policies, EndpointPolicies),
        provide(Regenerations, EndpointChanges),
        invoke(needed),
    )
    async with Hive(cell).started() as hive:
        yield hive


def log(node: Node, endpoint_id: int) -> list[tuple[State, str]]:
    """What happened, the first thing first."""
    return [(each.state, each.message) for each in reversed(node.endpoints.status(endpoint_id).entries())]


async def test_an_endpoint_is_listed_while_it_waits_and_not_in_the_kernel(
    node: Node, cluster: SlowAllocator
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node.endpoints.create, request(1))
        await anyio.wait_all_tasks_blocked()
        (waiting,) = node.endpoints.all()
        assert (waiting.state, waiting.identity) == (State.WAITING_FOR_IDENTITY, UNKNOWN)
        assert log(node, waiting.id) == [(State.WAITING_FOR_IDENTITY, "Endpoint creation")]
        assert node.endpoints.lookup(f"ipv4:{IP}") == waiting
        assert node.kernel.steps == ["acquire", "adopt"]
        assert node.saved == []
        cluster.may_answer.set()
    (made,) = node.endpoints.all()
    assert (made.state, made.identity, made.created) == (State.READY, 256, waiting.created)
    assert log(node, made.id) == [
        (State.WAITING_FOR_IDENTITY, "Endpoint creation"),
        (State.READY, "Set identity for this endpoint"),
        (
            State.WAITING_TO_REGENERATE,
            "Triggering endpoint regeneration due to Initial build on endpoint creation",
        ),
        (State.REGENERATING, "Starting endpoint regeneration"),
        (State.REGENERATING, f"Successfully regenerated endpoint program (Reason: {INITIAL})"),
        (State.READY, "Completed endpoint regeneration with no pending regeneration requests"),
    ]
    assert node.kernel.ipcache == {IP: 256}


async def test_an_identity_that_is_known_is_not_waited_for(node: Node, cluster: SlowAllocator) -> None:
    made = await node.endpoints.create(request(1, pod_namespace=""))
    assert (made.labels, made.state) == (INIT_LABELS, State.READY)
    assert cluster.asked == []


async def test_an_address_that_waits_is_in_use(node: Node) -> None:
    node.endpoints.begin(request(1))
    with pytest.raises(EndpointError, match=r"IP ipv4:10\.0\.1\.1 is already in use"):
        node.endpoints.begin(request(2, ipv4=IP))


@pytest.mark.parametrize("how", ["refused", "deleted", "cancelled"])
async def test_a_creation_that_comes_to_nothing_leaves_nothing(
    node: Node, cluster: SlowAllocator, how: str
) -> None:
    new = node.endpoints.begin(request(1))
    failed: list[EndpointError] = []

    async def wait() -> None:
        try:
            await node.endpoints.identify(new)
        except EndpointError as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        match how:
            case "refused":
                cluster.refuse = True
                cluster.may_answer.set()
            case "deleted":
                assert node.endpoints.delete(new.endpoint) == ()
            case "cancelled":
                tasks.cancel_scope.cancel()
    texts = [(error.status, error.text) for error in failed]
    assert (
        texts
        == {
            "refused": [(500, "the cluster gives none")],
            "deleted": [(500, "the endpoint was deleted during its creation")],
            "cancelled": [],
        }[how]
    )
    assert node.endpoints.all() == []
    assert node.kernel.is_clean
    assert node.addresses.released == []
    assert [identity.id for identity in node.identities.all()][-1] == 11
    with pytest.raises(EndpointError, match="deleted during"):
        node.endpoints.complete(new)


async def test_a_deletion_in_the_moment_the_identity_comes_leaves_no_reference(
    node: Node, cluster: SlowAllocator
) -> None:
    new = node.endpoints.begin(request(1))

    async def wait() -> None:
        with pytest.raises(EndpointError, match="deleted during"):
            await node.endpoints.identify(new)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        cluster.may_answer.set()
        node.endpoints.delete(new.endpoint)
    assert [identity.id for identity in node.identities.all()][-1] == 11
    assert node.kernel.is_clean


async def test_a_change_of_the_node_does_not_wait_for_an_endpoint_that_waits(
    node: Node, cluster: SlowAllocator, hive: Hive
) -> None:
    new = node.endpoints.begin(request(1))
    assert (
        await hive.get(Regenerations).request(new.endpoint.id, RegenerationLevel.POLICY, "a reason").result()
        == ""
    )
    assert len(log(node, new.endpoint.id)) == 1


async def test_new_labels_are_waited_for_in_state_waiting_for_identity(
    node: Node, cluster: SlowAllocator, hive: Hive
) -> None:
    cluster.may_answer.set()
    made = await node.endpoints.create(request(1))
    cluster.may_answer = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hive.get(EndpointChanges).relabel, made, ["k8s:tier=front"])
        await anyio.wait_all_tasks_blocked()
        (waiting,) = node.endpoints.all()
        assert (waiting.state, waiting.identity) == (State.WAITING_FOR_IDENTITY, made.identity)
        assert node.kernel.ipcache == {IP: made.identity}
        cluster.may_answer.set()
    (after,) = node.endpoints.all()
    assert (after.state, after.identity, after.custom_labels) == (State.READY, 257, ("k8s:tier=front",))
    assert node.kernel.ipcache == {IP: 257}
    assert cluster.released == [made.identity]


async def test_an_endpoint_that_goes_while_its_labels_change_takes_no_identity_along(
    node: Node, cluster: SlowAllocator, hive: Hive
) -> None:
    cluster.may_answer.set()
    made = await node.endpoints.create(request(1))
    cluster.may_answer = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hive.get(EndpointChanges).relabel, made, ["k8s:tier=front"])
        await anyio.wait_all_tasks_blocked()
        node.endpoints.delete(made)
        cluster.may_answer.set()
    assert [identity.id for identity in node.identities.all()][-1] == 11
    assert node.kernel.is_clean


async def test_an_endpoint_waits_for_the_labels_of_its_pod_and_is_built_with_them(
    tmp_path: Path, cluster: SlowAllocator
) -> None:
    pods = FakePods(followed=True)
    node = Node(tmp_path, cluster, pods)
    cluster.may_answer.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node.endpoints.create, request(1))
        await anyio.wait_all_tasks_blocked()
        (waiting,) = node.endpoints.all()
        assert (waiting.state, waiting.labels) == (State.WAITING_FOR_IDENTITY, INIT_LABELS)
        assert node.kernel.steps == ["acquire", "adopt"]
        pods.known["default", "web-1"] = [Label("k8s", "app", "web"), Label("k8s", "pod-template-hash", "1")]
        pods.labels_known.set()
    (made,) = node.endpoints.all()
    assert (made.labels, made.info_labels) == (("k8s:app=web",), ("k8s:pod-template-hash=1",))
    assert cluster.asked == [("k8s:app=web",)], "no identity is asked for before the labels are known"


async def test_an_endpoint_of_an_unknown_pod_starts_with_identity_init(tmp_path: Path) -> None:
    pods = FakePods(followed=True)
    pods.labels_known.set()
    node = Node(tmp_path, pods=pods)
    made = await node.endpoints.create(request(1))
    assert (made.labels, made.identity) == (INIT_LABELS, 5)


async def test_an_endpoint_of_a_pod_without_labels_that_count_begins_with_init(tmp_path: Path) -> None:
    """Without any no policy would select it, and all would be open."""
    pods = FakePods(followed=True)
    pods.known["default", "web-1"] = [Label("k8s", "pod-template-hash", "1")]
    made = await Node(tmp_path, pods=pods).endpoints.create(request(1))
    assert (made.labels, made.info_labels, made.identity) == (INIT_LABELS, ("k8s:pod-template-hash=1",), 5)


async def test_a_container_without_a_namespace_gets_identity_init_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, pods=FakePods(followed=True))
    new = node.endpoints.begin(msgspec.structs.replace(request(1), pod_namespace=""))
    assert new.identity is not None
    assert node.endpoints.complete(new).labels == INIT_LABELS


async def test_an_endpoint_has_the_mac_address_that_its_pod_asks_for(tmp_path: Path) -> None:
    pods = FakePods(followed=True)
    pods.macs["default", "web-1"] = "0A:00:00:00:00:77"
    node = Node(tmp_path, pods=pods)
    late = node.endpoints.begin(request(1))
    pods.known["default", "web-1"] = []
    pods.labels_known.set()
    await node.endpoints.identify(late)
    made = node.endpoints.complete(late)
    assert made.pod_mac.hex(":") == "0a:00:00:00:00:77"
    assert node.endpoints.delete(made) == ()
    assert (await node.endpoints.create(request(1))).pod_mac == made.pod_mac


@pytest.mark.parametrize("mac", ["zz", "01:00:00:00:00:01", "00:00:00:00:00:00"])
@pytest.mark.parametrize("late", [False, True])
async def test_a_pod_that_asks_for_a_mac_address_that_none_can_have_is_refused(
    tmp_path: Path, mac: str, late: bool
) -> None:
    pods = FakePods(followed=True)
    pods.macs["default", "web-1"] = mac
    node = Node(tmp_path, pods=pods)
    pods.labels_known.set()
    pods.known["default", "web-1"] = []
    pods.late = late
    with pytest.raises(EndpointError, match=r"pod annotation cni\.cilium\.io/mac-address: ") as refused:
        await node.endpoints.create(request(1))
    assert refused.value.status == 400
    assert (node.endpoints.all(), node.kernel.is_clean) == ([], True)


async def test_another_endpoint_of_the_pod_ends_a_creation_that_waits(
    node: Node, cluster: SlowAllocator
) -> None:
    refused: list[str] = []

    async def create(number: int) -> None:
        wanted = msgspec.structs.replace(request(number), pod_name="web-0", pod_namespace="default")
        try:
            await node.endpoints.create(wanted)
        except EndpointError as error:
            refused.append(error.text)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(create, 1)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(create, 2)
        await anyio.wait_all_tasks_blocked()
        assert refused == ["superseded by a newer endpoint of the same pod"]
        (waiting,) = node.endpoints.all()
        cluster.may_answer.set()
    (ready,) = node.endpoints.all()
    assert (ready.id, ready.state) == (waiting.id, State.READY)


async def test_endpoints_of_other_pods_and_without_one_are_created_side_by_side(
    node: Node, cluster: SlowAllocator
) -> None:
    async with anyio.create_task_group() as tasks:
        for number, name in enumerate(("", "web-0", "web-1"), 1):
            wanted = msgspec.structs.replace(request(number), pod_name=name, pod_namespace="default")
            tasks.start_soon(node.endpoints.create, wanted)
        await anyio.wait_all_tasks_blocked()
        assert len(node.endpoints.all()) == 3
        cluster.may_answer.set()
    assert {each.state for each in node.endpoints.all()} == {State.READY}
