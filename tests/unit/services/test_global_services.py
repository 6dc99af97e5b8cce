"""Global services: backends of remote clusters beside those of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import anyio
import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from cells.clustermesh import families
from cells.clustermesh.tables import (
    BY_NAME,
    MeshSettings,
    MeshTables,
    RemotePort,
    RemoteService,
    RemoteServiceKey,
    mesh_services,
)
from cells.config import AgentConfig
from cells.kubernetes.objects.core import ENDPOINT_SLICES, EndpointSlice, Node, Service
from cells.kubernetes.resources import INDEXES
from cells.services import (
    PROTOCOLS,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceAddress,
    ServingNode,
)
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.control.watch import ServiceWatch, WatchedObjects
from cells.services.map_entries import read
from cells.services.model.backends import Affinity, RefusedBackend, with_remote
from cells.services.model.claims import frontends
from cells.services.model.frontends import affinity_of, faults_of, frontends_of, is_global
from lifecycle import Table, Tables
from lifecycle.testing import eventually
from tests.support.catalog import LoneCatalog
from tests.unit.services.agent import FakeServiceMaps

OPTIONS: Final = LoadBalancerOptions(global_services=True)
HERE: Final = ServingNode("here", zone="a")

Json = Any


def remote_services() -> Table[RemoteServiceKey, RemoteService]:
    return Table(
        "global-services",
        key=lambda one: one.key,
        indexes={BY_NAME: lambda one: ((one.namespace, one.name),)},
    )


def remote(cluster: str, *addresses: str, port: int = 80) -> RemoteService:
    backends = {each: {"http": RemotePort("TCP", port)} for each in addresses}
    return RemoteService(
        cluster=cluster, namespace="shop", name="web", cluster_id=2, backends=backends, shared=True
    )


def service(**annotations: str) -> Service:
    given = {f"service.cilium.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    spec = {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.1",
        "clusterIPs": ["10.96.0.1"],
        "ports": [{"name": "http", "port": 80, "nodePort": 30080, "protocol": "TCP"}],
    }
    metadata = {"namespace": "shop", "name": "web", "annotations": given}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Service)


def slice_of(*addresses: str, ready: bool = True) -> EndpointSlice:
    conditions = {"ready": ready, "serving": True, "terminating": not ready}
    endpoints = [{"addresses": [each], "conditions": conditions, "nodeName": "there"} for each in addresses]
    return msgspec.convert(
        {
            "metadata": {
                "namespace": "shop",
                "name": "web-1",
                "labels": {"kubernetes.io/service-name": "web"},
            },
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        },
        EndpointSlice,
    )


# The merge, against a plain model.

_ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.10", "fd00::1", "fd00::2"])
_PORTS = st.dictionaries(
    st.sampled_from(["", "http", "dns"]),
    st.builds(RemotePort, st.sampled_from(["TCP", "UDP", "DCCP"]), st.integers(0, 3)),
    max_size=3,
)
_LOCAL = st.dictionaries(
    st.sampled_from(["", "http", "dns"]),
    st.dictionaries(st.tuples(_ADDRESSES, st.integers(1, 2)), st.sampled_from(BackendState), max_size=3),
    max_size=2,
)
_REMOTE = st.dictionaries(
    st.sampled_from(["east", "north", "west"]), st.dictionaries(_ADDRESSES, _PORTS, max_size=4), max_size=3
)
Merged = set[tuple[str, str, int, int, str, bool]]


def model(
    local: Mapping[str, Mapping[tuple[str, int], BackendState]],
    others: Mapping[str, Mapping[str, Mapping[str, RemotePort]]],
    affinity: Affinity,
) -> Merged:
    """Port name, address, port, protocol, cluster and preference of every backend."""
    own = {ip for some in local.values() for ip, _ in some}
    found = {(name, ip, port, 6, "", affinity == "local") for name, of in local.items() for ip, port in of}
    for cluster, backends in others.items():
        for ip, ports in backends.items():
            first = min(each for each in others if ip in others[each])
            if ip not in own and cluster == first:
                found |= {
                    (name, ip, one.port, PROTOCOLS[one.protocol], cluster, affinity == "remote")
                    for name, one in ports.items()
                    if one.protocol in PROTOCOLS and one.port
                }
    return found


@given(_LOCAL, _REMOTE, st.sampled_from(["", "local", "remote"]))
def test_an_address_belongs_to_this_cluster_else_to_the_first_that_has_it(
    local: dict[str, dict[tuple[str, int], BackendState]],
    others: dict[str, dict[str, dict[str, RemotePort]]],
    affinity: Affinity,
) -> None:
    own = {
        name: tuple(
            sorted(
                (
                    Backend(ServiceAddress(ip_address(ip), port, 6), state, port_name=name)
                    for (ip, port), state in some.items()
                ),
                key=lambda one: one.address,
            )
        )
        for name, some in local.items()
    }
    rows = [
        RemoteService(cluster=each, namespace="shop", name="web", cluster_id=2, backends=backends)
        for each, backends in others.items()
    ]
    merged, refused = with_remote(own, rows, affinity, OPTIONS)
    assert {
        (name, str(one.address.ip), one.address.port, one.address.protocol, one.cluster, one.preferred)
        for name, some in merged.items()
        for one in some
    } == model(local, others, affinity)
    for some in merged.values():
        assert list(some) == sorted(some, key=lambda one: one.address)
    lost = {
        (cluster, ip)
        for cluster, backends in others.items()
        for ip in backends
        if ip in {ip for each in local.values() for ip, _ in each}
        or cluster != min(each for each in others if ip in others[each])
    }
    assert {(one.cluster, one.address) for one in refused} == lost


def test_remote_addresses_that_are_none_of_a_backend_are_refused() -> None:
    merged, refused = with_remote({}, [remote("east", "127.0.0.1", "10.2.0.5", "fe80::1")], "", OPTIONS)
    assert [str(one.address) for one in merged["http"]] == ["10.2.0.5:80"]
    reason = "is not an address of a backend"
    assert refused == [
        RefusedBackend("east", text, reason, conflict=False) for text in ("127.0.0.1", "fe80::1")
    ]


# Which of them serve what.


def addresses(found: Iterable[Frontend], wanted: Callable[[Frontend], bool]) -> set[str]:
    return {str(one.address.ip) for frontend in found if wanted(frontend) for one in frontend.backends}


def test_local_traffic_policies_and_hints_leave_remote_backends_in() -> None:
    web = service(**{"global": "true"})
    own = Backend(ServiceAddress(ip_address("10.0.0.1"), 80, 6), node="here", hinted_zones=("a",))
    far = Backend(ServiceAddress(ip_address("10.0.0.2"), 80, 6), node="there", hinted_zones=("b",))
    merged, _ = with_remote({"http": (own, far)}, [remote("east", "10.2.0.5")], "", OPTIONS)

    def of(**spec: str) -> list[Frontend]:
        one = msgspec.structs.replace(web, spec=msgspec.structs.replace(web.spec, **spec))
        return frontends_of(one, merged, HERE, OPTIONS)

    every = {"10.0.0.1", "10.0.0.2", "10.2.0.5"}
    near = {"10.0.0.1", "10.2.0.5"}
    assert addresses(of(), lambda _: True) == every
    outside = of(external_traffic_policy="Local")
    assert addresses(outside, lambda one: one.key.scope == 0 and one.two_scopes) == near
    assert addresses(outside, lambda one: one.type.text == "ClusterIP") == every
    inside = of(internal_traffic_policy="Local")
    assert addresses(inside, lambda one: one.type.text == "ClusterIP") == near
    topology = msgspec.structs.replace(OPTIONS, enable_service_topology=True)
    assert addresses(frontends_of(web, merged, HERE, topology), lambda _: True) == near


@pytest.mark.parametrize(
    ("annotations", "wanted"),
    [
        ({"service.cilium.io/global": "TRUE"}, (True, "")),
        ({"service.cilium.io/global": "1"}, (False, "")),
        ({"io.cilium/global-service": "true", "io.cilium/service-affinity": "Local"}, (True, "local")),
        ({"io.cilium/global-service": "true", "service.cilium.io/global": "no"}, (False, "")),
        ({"service.cilium.io/global": "true", "service.cilium.io/affinity": "none"}, (True, "")),
        ({"service.cilium.io/affinity": "remote"}, (False, "")),
    ],
)
def test_annotations_of_global_services(annotations: dict[str, str], wanted: tuple[bool, str]) -> None:
    found = msgspec.convert({"metadata": {"name": "web", "annotations": annotations}}, Service)
    assert (is_global(found), affinity_of(found)) == wanted


def test_annotations_of_global_services_without_effect_are_reported() -> None:
    def faults(given: dict[str, str], options: LoadBalancerOptions = OPTIONS) -> dict[str, str]:
        found = msgspec.convert({"metadata": {"name": "web", "annotations": given}}, Service)
        return dict(faults_of(found, options))

    name, alias = "service.cilium.io/global", "io.cilium/global-service"
    assert faults({name: "true", "service.cilium.io/affinity": "LOCAL"}) == {}
    assert faults({name: "true", "service.cilium.io/shared": "false"}) == {}
    assert faults({alias: "yes"}) == {alias: "'yes': expected true or false: the service is not global"}
    assert faults({name: "true", "io.cilium/service-affinity": "near"}) == {
        "io.cilium/service-affinity": "'near': expected local or remote: no backend is preferred"
    }
    assert faults({"service.cilium.io/affinity": "local"}) == {
        "service.cilium.io/affinity": "the service is not global"
    }
    alone = LoadBalancerOptions()
    assert "cluster-id and clustermesh-config" in faults({alias: "true"}, alone)[alias]
    assert faults({name: "false", "service.cilium.io/shared": "true"}, alone) == {}


# In an agent: what changes while it runs, and when it starts.


class World:
    """Tables of objects and of remote services, and the frontends that follow."""

    def __init__(self, **annotations: str) -> None:
        self.services: Table[tuple[str, str], Service] = Table("services", key=lambda one: one.key)
        self.slices: Table[tuple[str, str], EndpointSlice] = Table(
            "slices", key=lambda one: one.key, indexes=INDEXES[ENDPOINT_SLICES.qualified]
        )
        nodes: Table[tuple[str, str], Node] = Table("nodes", key=lambda one: one.key)
        self.remote = remote_services()
        self.listed = self.remote.initializer("clusters")
        self.frontends = frontends()
        objects = WatchedObjects(self.services, self.slices, nodes, remote=self.remote)
        self.watch = ServiceWatch(
            lambda: "here", objects, self.frontends, OPTIONS, log=structlog.get_logger()
        )
        self.services.put(service(**(annotations or {"global": "true"})))
        self.slices.put(slice_of("10.1.0.5"))

    def backends(self) -> set[str]:
        return {str(one.address.ip) for row in self.frontends.all() for one in row.backends}


@pytest.mark.anyio
async def test_this_clusters_backends_wait_for_no_other_cluster() -> None:
    world = World()
    async with anyio.create_task_group() as group:
        group.start_soon(world.watch.run)
        await world.frontends.wait_initialized()
        assert world.backends() == {"10.1.0.5"}
        assert all(row.partial for row in world.frontends.all())
        world.remote.put(remote("east", "10.2.0.5"))
        await eventually(lambda: world.backends() == {"10.1.0.5", "10.2.0.5"})
        assert all(row.partial for row in world.frontends.all())
        world.listed.done()
        await eventually(lambda: not any(row.partial for row in world.frontends.all()))
        with world.remote.txn() as rows:
            rows.delete(("east", "shop", "web"))
        await eventually(lambda: world.backends() == {"10.1.0.5"})
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_only_global_services_are_partial_until_clusters_are_listed() -> None:
    world = World(affinity="local")
    world.remote.put(remote("east", "10.2.0.5"))
    async with anyio.create_task_group() as group:
        group.start_soon(world.watch.run)
        await world.frontends.wait_initialized()
        assert world.backends() == {"10.1.0.5"}
        assert not any(row.partial for row in world.frontends.all())
        world.services.put(service(**{"global": "true"}))  # the annotation alone
        await eventually(lambda: world.backends() == {"10.1.0.5", "10.2.0.5"})
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_backends_of_two_clusters_with_one_address_are_reported_once() -> None:
    world = World()
    world.remote.put(remote("east", "10.2.0.5"))
    with capture_logs() as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(world.watch.run)
            await world.frontends.wait_initialized()
            world.remote.put(remote("west", "10.2.0.5", "10.3.0.5", port=90))
            await eventually(lambda: len(world.backends()) == 3)
            world.remote.put(remote("west", "10.2.0.5", "10.3.0.6", port=90))
            await eventually(lambda: "10.3.0.6" in world.backends())
            with world.remote.txn() as rows:
                rows.delete(("east", "shop", "web"))
            west = ServiceAddress(ip_address("10.2.0.5"), 90, 6)
            await eventually(lambda: west in {one.address for one in world.frontends.all()[0].backends})
            group.cancel_scope.cancel()
    conflicts = [one for one in logs if one["event"] == "Conflicting service backend IP"]
    assert [(one["service"], one["cluster"], one["address"]) for one in conflicts] == [
        ("shop/web", "west", "10.2.0.5")
    ]


class Maps:
    """The maps of a node over several agents."""

    def __init__(self) -> None:
        self.kernel = FakeServiceMaps()

    def agent(self) -> tuple[Table[FrontendKey, Frontend], ServicesTarget]:
        table, served = frontends(), served_frontends()
        return table, ServicesTarget(table, LoadBalancer(OPTIONS, served), self.kernel, served)

    async def led(self) -> set[str]:
        found = read(await self.kernel.dump(), (4, 6))
        return {str(one.address) for each in found.frontends for one in each.frontend.backends}

    async def chosen(self) -> int:
        """How many backends new connections may go to."""
        (found,) = read(await self.kernel.dump(), (4, 6)).frontends
        return int.from_bytes(found.master[4:6], "little")


def served(*backends: Backend, partial: bool = False) -> Frontend:
    catalog = LoneCatalog(OPTIONS, HERE)
    catalog.upsert_service(service())
    found = next(one for one in catalog.frontends.all() if one.type.text == "ClusterIP")
    return msgspec.structs.replace(found, backends=backends, partial=partial)


def at(ip: str, *, preferred: bool = False, state: BackendState = BackendState.ACTIVE) -> Backend:
    return Backend(ServiceAddress(ip_address(ip), 80, 6), state, preferred=preferred)


@pytest.mark.anyio
async def test_an_earlier_agents_remote_backends_stay_until_clusters_are_listed() -> None:
    maps = Maps()
    table, target = maps.agent()
    table.put(served(at("10.1.0.5"), at("10.2.0.5"), at("10.2.0.6")))
    await target.observe()

    table, target = maps.agent()
    table.put(served(at("10.1.0.5"), partial=True))
    await target.observe()
    assert await maps.led() == {"10.1.0.5:80", "10.2.0.5:80", "10.2.0.6:80"}
    more = served(at("10.1.0.6"), at("10.2.0.5"), partial=True)  # a local backend ends: that is known
    await target.put({more.key: more})
    assert await maps.led() == {"10.1.0.6:80", "10.2.0.5:80", "10.2.0.6:80"}
    fewer = served(at("10.1.0.6"), partial=True)  # and so does a remote one that was there
    await target.put({fewer.key: fewer})
    assert await maps.led() == {"10.1.0.6:80", "10.2.0.6:80"}
    complete = served(at("10.1.0.6"))
    await target.put({complete.key: complete})
    assert await maps.led() == {"10.1.0.6:80"}


@pytest.mark.anyio
async def test_others_serve_only_while_no_preferred_backend_is_active() -> None:
    maps = Maps()
    table, target = maps.agent()
    table.put(served(at("10.1.0.5", preferred=True), at("10.2.0.5"), at("10.2.0.6")))
    await target.observe()
    assert (await maps.chosen(), len(await maps.led())) == (1, 3)
    ending = at("10.1.0.5", preferred=True, state=BackendState.TERMINATING)
    one = served(ending, at("10.2.0.5"), at("10.2.0.6"))
    await target.put({one.key: one})
    assert await maps.chosen() == 2
    one = served(at("10.2.0.5"), at("10.2.0.6"))
    await target.put({one.key: one})
    assert await maps.chosen() == 2


def test_metrics_count_services_by_name_whatever_clusters_have_them() -> None:
    agent = cast("AgentConfig", SimpleNamespace(cluster_id=1))
    mesh = MeshTables(agent, MeshSettings(clustermesh_config=Path("/mesh")), Tables())
    for row in (remote("east", "10.2.0.5"), remote("west")):
        mesh.services.put(row)
    mesh.services.put(msgspec.structs.replace(remote("west"), name="private", shared=False))
    found = {one.name: one for one in families(mesh, mesh_services(mesh, Tables()), "home", "here")}
    family = found["cilium_clustermesh_global_services"]
    assert family.series == {("home", "here"): 1}
