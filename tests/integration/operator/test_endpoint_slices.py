"""CiliumEndpointSlices: each endpoint is in one, none exceeds the limit, no needless moves."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_ENDPOINT_SLICES,
    CiliumEndpoint,
    CiliumEndpointSlice,
    CiliumEndpointStatus,
    CoreEndpoint,
    EndpointIdentity,
    Networking,
)
from cells.kubernetes.objects.core import NAMESPACES
from cells.kubernetes.objects.kind import Key, Meta
from cells.observe.metrics import Metrics
from cells.operator.endpoint_slices.slices import (
    EndpointSlices,
    SliceRow,
    Slices,
    SliceSettings,
    core_endpoint,
)
from cells.operator.leader import LeaderHive
from lifecycle import Table
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.examples import scaled
from tests.support.operator import Operators

MOST = 3
SLICES = Resource("cilium.io", "ciliumendpointslices")


def publish(server: ApiServer, name: str, namespace: str = "default", identity: int = 7) -> None:
    """Make a pod and its CiliumEndpoint."""
    meta = {"name": name, "namespace": namespace}
    spec = {"nodeName": "n", "containers": [{"name": "c", "image": "example.invalid/c"}]}
    server.add({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    networking = {"addressing": [{"ipv4": "10.0.0.9"}], "node": "192.0.2.1"}
    status = {"identity": {"id": identity}, "networking": networking}
    kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumEndpoint"}
    server.add({**kind, "metadata": meta, "status": status})


def endpoint(name: str, identity: int = 7, namespace: str = "a", node: str = "n") -> CiliumEndpoint:
    status = CiliumEndpointStatus(
        identity=EndpointIdentity(identity) if identity else None, networking=Networking(node=node)
    )
    return CiliumEndpoint(Meta(name=name, namespace=namespace), status)


ACTIONS = st.lists(
    st.tuples(st.sampled_from("pqrstuvw"), st.sampled_from("ab"), st.integers(-1, 3)), max_size=40
)  # identity -1: deleted, 0: without one yet


@settings(max_examples=scaled(80), deadline=None)
@given(ACTIONS, st.booleans())
def test_every_endpoint_is_in_one_slice_of_its_kind(
    actions: list[tuple[str, str, int]], by_identity: bool
) -> None:
    slices, rows = Slices(MOST, by_identity=by_identity), dict[str, SliceRow]()
    live: dict[Key, CiliumEndpoint] = {}
    for name, namespace, identity in actions:
        key = (namespace, name)
        one = endpoint(name, identity, namespace) if identity >= 0 else None
        if one is None:
            live.pop(key, None)
        else:
            live[key] = one
        before = {(row.namespace, each.name): at for at, row in rows.items() for each in row.endpoints}
        for at, row in slices.update({key: one}).items():
            if row is None:
                rows.pop(at, None)
            else:
                rows[at] = row
        found = [((row.namespace, each.name), at, each) for at, row in rows.items() for each in row.endpoints]
        wanted = {key: core for key, one in live.items() if (core := core_endpoint(one)) is not None}
        assert {key: each for key, _, each in found} == wanted
        assert len(found) == len(wanted)
        assert all(0 < len(row.endpoints) <= MOST for row in rows.values())
        if by_identity:
            assert all(len({each.id for each in row.endpoints}) == 1 for row in rows.values())
        moved = {other for other, at, _ in found if before.get(other, at) != at}
        assert moved <= {key}


def test_existing_slices_are_adopted_and_an_endpoint_in_two_stays_in_one() -> None:
    def held(name: str, *names: str) -> CiliumEndpointSlice:
        cores = tuple(CoreEndpoint(each, 7, Networking(node="n")) for each in names)
        return CiliumEndpointSlice(Meta(name=name), cores, "a")

    slices = Slices(MOST, by_identity=True)
    slices.adopt([held("ces-1", "p", "q"), held("ces-2", "q", "gone"), held("ces-3", "gone-too")])
    rows = slices.begin([endpoint("p"), endpoint("q"), endpoint("new")])
    names = {name: [each.name for each in row.endpoints] for name, row in rows.items() if row is not None}
    assert names == {"ces-1": ["p", "q", "new"]}


def test_the_limit_of_the_most_nodes_that_there_are_counts() -> None:
    text = '[{"nodes":100,"limit":50,"burst":60},{"nodes":0,"limit":5,"burst":10}]'
    given = SliceSettings(ces_rate_limits=text)
    assert [given.limit(nodes).limit for nodes in (0, 99, 100, 5000)] == [5, 5, 50, 50]
    for wrong in ("[]", "x", '[{"nodes":0}]', '[{"nodes":0,"limit":0,"burst":1}]'):
        with pytest.raises(ValueError, match="ces-rate-limits"):
            SliceSettings(ces_rate_limits=wrong).validate()


@pytest.mark.anyio
async def test_a_deleted_endpoint_slice_is_created_again(server: ApiServer, operators: Operators) -> None:
    values = {"cluster-pool-ipv4-cidr": "10.0.0.0/8", "enable-cilium-endpoint-slice": "true"}

    def held() -> list[str]:
        found = server.store.of(SLICES).objects.values()
        return [each["name"] for one in found for each in one["endpoints"]]

    async with operators.running(values), operators.client() as client:
        publish(server, "p")
        await eventually(lambda: held() == ["p"], 30)
        ((_, name),) = server.store.of(SLICES).objects
        await client.delete(CILIUM_ENDPOINT_SLICES, name)
        publish(server, "q")
        await eventually(lambda: sorted(held()) == ["p", "q"], 30)


@pytest.mark.anyio
async def test_slices_that_others_change_are_restored_at_once(
    server: ApiServer, operators: Operators
) -> None:
    """As Cilium's operator does; the comparison of all slices runs every minute only."""
    values = {"cluster-pool-ipv4-cidr": "10.0.0.0/8", "enable-cilium-endpoint-slice": "true"}

    def held() -> dict[str, list[str]]:
        found = server.store.of(SLICES).objects.items()
        return {name: sorted(each["name"] for each in one["endpoints"]) for (_, name), one in found}

    async with operators.running(values), operators.client() as client:
        publish(server, "p")
        publish(server, "q")
        await eventually(lambda: list(held().values()) == [["p", "q"]], 30)
        before = held()
        (name,) = before
        await client.patch(CILIUM_ENDPOINT_SLICES, name, {"endpoints": []})
        await eventually(lambda: held() == before, 20)
        await client.delete(CILIUM_ENDPOINT_SLICES, name)
        await eventually(lambda: held() == before, 20)
        foreign = {**server.store.of(SLICES).objects["", name], "metadata": {"name": "foreign"}}
        server.add(foreign)
        await eventually(lambda: held() == before, 20)


@pytest.mark.anyio
async def test_after_a_restart_only_slices_that_change_have_a_queueing_delay(
    server: ApiServer, operators: Operators
) -> None:
    """It would be counted from the start of the operator, be that days ago."""
    values = {"cluster-pool-ipv4-cidr": "10.0.0.0/8", "enable-cilium-endpoint-slice": "true"}
    async with operators.running(values):
        publish(server, "p")
        await eventually(lambda: len(server.store.of(SLICES).objects) == 1, 30)
    async with operators.running(values) as hive:
        inner = hive.get(LeaderHive).current
        assert inner is not None
        with anyio.fail_after(30):
            await inner.get(Table[str, SliceRow]).wait_initialized()
        assert inner.get(EndpointSlices).waiting == {}


@pytest.mark.anyio
async def test_a_namespace_that_goes_first_does_not_wait_for_the_others(
    server: ApiServer, operators: Operators
) -> None:
    values = {
        "cluster-pool-ipv4-cidr": "10.0.0.0/8",
        "enable-cilium-endpoint-slice": "true",
        "ces-rate-limits": '[{"nodes":0,"limit":10,"burst":1}]',
    }
    many = 60

    def written() -> list[str]:
        return [one["namespace"] for one in server.store.of(SLICES).objects.values()]

    async with operators.running(values) as hive:
        urgent = {"name": "urgent", "annotations": {"cilium.io/ces-namespace": "priority"}}
        server.add({"apiVersion": "v1", "kind": "Namespace", "metadata": urgent})
        for number in range(many):
            publish(server, f"p{number}", "default", 1000 + number)
        await eventually(lambda: len(written()) >= 2, 30)
        publish(server, "now", "urgent", 999)
        await eventually(lambda: "urgent" in written(), 30)
        assert len(written()) < many, "others still wait"
        families = {one.name: one for one in await hive.get(Metrics).families()}
        delays = families["cilium_operator_ces_queueing_delay_seconds"].series
        assert {key: value.count for key, value in delays.items()}[("fast",)] == 1  # type: ignore[union-attr]
        sizes = families["cilium_operator_number_of_ceps_per_ces"].series[()]
        assert sizes.count >= 3  # type: ignore[union-attr]


@pytest.mark.anyio
async def test_a_slice_stays_when_its_namespace_gets_priority(
    server: ApiServer, operators: Operators
) -> None:
    values = {"cluster-pool-ipv4-cidr": "10.0.0.0/8", "enable-cilium-endpoint-slice": "true"}
    async with operators.running(values) as hive, operators.client() as client:
        publish(server, "p")
        await eventually(lambda: len(server.store.of(SLICES).objects) == 1, 30)
        (before,) = server.store.of(SLICES).objects
        first = {"metadata": {"annotations": {"cilium.io/ces-namespace": "priority"}}}
        await client.patch(NAMESPACES, "default", first)

        async def fast() -> int:
            families = {one.name: one for one in await hive.get(Metrics).families()}
            value = families["cilium_operator_number_of_ceps_per_ces"].series[()]
            return value.count  # type: ignore[union-attr]

        with anyio.fail_after(30):
            while await fast() < 2:  # noqa: ASYNC110  # metrics can only be asked for
                await anyio.sleep(0.02)
        assert list(server.store.of(SLICES).objects) == [before]
