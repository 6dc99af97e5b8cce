"""Changes of an endpoint: user labels with the identity, and source verification."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cells.cluster.identity.identities import Identities
from cells.endpoint import (
    Endpoint,
    EndpointChanges,
    EndpointError,
    Endpoints,
    RegenerationRecovery,
    Regenerations,
    State,
)
from cells.policy.maps import EndpointPolicies
from lifecycle import Hive, invoke, module, provide, supply
from tests.unit.endpoint.fakes import Node, request

pytestmark = pytest.mark.anyio


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def changes(node: Node) -> AsyncIterator[EndpointChanges]:
    def needed(_: EndpointChanges) -> None: ...

    cell = module(
        "endpoint",
        "changes over fakes",
        supply(node.endpoints, Endpoints),
        supply(node.identities, Identities),
        supply(node.policies, EndpointPolicies),
        supply(node.recovery, RegenerationRecovery),
        provide(Regenerations, EndpointChanges),
        invoke(needed),
    )
    async with Hive(cell).started() as hive:
        yield hive.get(EndpointChanges)


def only(node: Node) -> Endpoint:
    (endpoint,) = node.endpoints.all()
    return endpoint


async def test_a_users_labels_change_the_identity_everywhere(node: Node, changes: EndpointChanges) -> None:
    before = node.create(request(1))
    assert await changes.relabel(before, ["k8s:tier=front"]) == ""
    after = only(node)
    assert after.labels == (*before.labels[:2], "k8s:tier=front") == tuple(sorted(after.labels))
    assert after.custom_labels == ("k8s:tier=front",)
    assert (after.identity != before.identity, after.state) == (True, State.READY)
    assert set(node.kernel.ipcache.values()) == {after.identity}
    assert node.identities.get(before.identity) is None, "nobody has the former identity any more"
    saved = node.files.scan().endpoints[after.id].endpoint
    assert (saved.labels, saved.custom_labels, saved.identity) == (
        after.labels,
        after.custom_labels,
        after.identity,
    )
    newest = [entry.message for entry in node.endpoints.status(1).entries()]
    assert "Triggering identity resolution due to updated identity labels" in newest
    assert await changes.relabel(only(node), []) == ""
    assert only(node).labels == before.labels


async def test_labels_of_the_pod_stay_its_own(node: Node, changes: EndpointChanges) -> None:
    before = node.create(request(1))
    steps = len(node.kernel.steps)
    own = "io.kubernetes.pod.namespace=mine"
    assert await changes.relabel(before, [f"k8s:{own}", "k8s:pod-template-hash=1", ""]) == ""
    assert only(node) == before
    assert len(node.kernel.steps) == steps, "what changes nothing builds nothing"


async def test_reserved_labels_are_refused(node: Node, changes: EndpointChanges) -> None:
    endpoint = node.create(request(1))
    with pytest.raises(EndpointError, match="Not allowed to add reserved labels: reserved:host") as refused:
        await changes.relabel(endpoint, ["reserved:host", "k8s:a=b"])
    assert refused.value.status == 500
    assert only(node) == endpoint


async def test_an_endpoint_may_be_let_off_source_verification(node: Node, changes: EndpointChanges) -> None:
    endpoint = node.create(request(1))
    assert await changes.verify_source(endpoint, verify=True) == ""
    assert await changes.verify_source(endpoint, verify=False) == ""
    assert node.kernel.any_source[101] is True
    assert node.files.scan().endpoints[1].endpoint.datapath.disable_sip_verification
    assert await changes.verify_source(only(node), verify=True) == ""
    assert node.kernel.any_source[101] is False


async def test_a_failed_option_change_returns_the_error(node: Node, changes: EndpointChanges) -> None:
    endpoint = node.create(request(1))
    node.kernel.refuse = "put_config"
    assert await changes.verify_source(endpoint, verify=False) == "[Errno 12] no put_config today"
    assert node.recovery.recoveries == [1]


async def test_labels_that_the_kernel_does_not_take_change_nothing(
    node: Node, changes: EndpointChanges
) -> None:
    endpoint = node.create(request(1))
    known = len(node.identities.all())
    node.kernel.refuse = "put_ipcache"
    with pytest.raises(EndpointError, match="no put_ipcache today") as refused:
        await changes.relabel(endpoint, ["k8s:tier=front"])
    assert refused.value.status == 500
    assert only(node) == endpoint
    assert len(node.identities.all()) == known
