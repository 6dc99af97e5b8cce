"""Addresses that no service may use outside: the cluster's own, in any order of events."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Interface, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.kubernetes.objects.core import EndpointSlice, Pod, Service
from cells.node.devices import Device
from cells.services import Frontend, FrontendKey, LoadBalancerOptions, ServiceName, ServingNode, plain
from cells.services.control import ServedFrontend
from cells.services.model.claims import (
    EXTERNAL_IPS,
    HOST_IP,
    Holder,
    RefusedAddress,
    Reservation,
)
from lifecycle import ReadTable, Table, provide
from lifecycle.testing import eventually
from tests.support.catalog import LoneCatalog
from tests.unit.fuzz.inputs import bounded
from tests.unit.services.agent import FakeServiceMaps, agent

pytestmark = pytest.mark.anyio

NODE_IP, ROUTER_IP, POD_RANGE = "192.0.2.1", "10.1.0.1", "10.1.0.0/24"
RESERVED = (
    Reservation(ip_address(NODE_IP), Holder.NODE, "an address of node n1"),
    Reservation(ip_address(ROUTER_IP), Holder.ROUTER, "the router's address of node n1"),
    Reservation(ip_network(POD_RANGE), Holder.POD, f"in {POD_RANGE}, the pods' range of node n1"),
)


def service(
    name: str,
    cluster_ip: str = "",
    *,
    external: Iterable[str] = (),
    ingress: Iterable[str] = (),
    port: int = 443,
    namespace: str = "shop",
) -> Service:
    spec = {
        "clusterIP": cluster_ip,
        "externalIPs": list(external),
        "type": "LoadBalancer",
        "ports": [{"port": port, "protocol": "TCP"}],
    }
    status = {"loadBalancer": {"ingress": [{"ip": ip} for ip in ingress]}}
    body = {"metadata": {"name": name, "namespace": namespace}, "spec": spec, "status": status}
    return msgspec.convert(body, Service)


def slice_(name: str, *addresses: str, namespace: str = "shop") -> EndpointSlice:
    body = {
        "metadata": {
            "name": f"{name}-1",
            "namespace": namespace,
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv6" if ":" in addresses[0] else "IPv4",
        "endpoints": [{"addresses": [each]} for each in addresses],
        "ports": [{"port": 6443, "protocol": "TCP"}],
    }
    return msgspec.convert(body, EndpointSlice)


class Cluster:
    """A catalog, and the frontends as it leaves them."""

    def __init__(self, **options: Any) -> None:
        self.catalog = LoneCatalog(LoadBalancerOptions(**options), ServingNode("here"))

    @property
    def frontends(self) -> dict[str, Frontend]:
        """What is served."""
        return {str(one.key): one for one in self.catalog.frontends.all()}

    @property
    def served(self) -> dict[str, str]:
        """The service's name, by frontend."""
        return {key: one.service.name for key, one in self.frontends.items()}

    def reasons(self, name: str) -> dict[str, str]:
        """Why a service does not get an address."""
        rows = self.catalog.refused.get(ServiceName("shop", name), ())
        return {str(one.address): one.reason for one in rows}


@pytest.mark.parametrize("first", ["victim", "thief"])
@pytest.mark.parametrize("port", [443, 8080])
@pytest.mark.parametrize("way", ["external", "ingress"])
def test_no_service_takes_the_cluster_address_of_another(first: str, port: int, way: str) -> None:
    """Whichever comes first, at the same port and at any other; and what is asked is served without it."""
    cluster = Cluster()
    victim = service("kubernetes", "10.96.0.1", namespace="default")
    given: dict[str, Any] = {way: ["10.96.0.1", "203.0.113.7"]}
    thief = service("thief", "10.96.0.9", port=port, **given)
    for one in (victim, thief) if first == "victim" else (thief, victim):
        cluster.catalog.upsert_service(one)
    theirs = {f"{ip}:{port}": "thief" for ip in ("10.96.0.9", "203.0.113.7")}
    assert cluster.served == {"10.96.0.1:443": "kubernetes"} | theirs
    assert cluster.reasons("thief") == {"10.96.0.1": "is the cluster address of default/kubernetes"}
    assert cluster.catalog.contested == {}
    cluster.catalog.delete_service(ServiceName("default", "kubernetes"))
    assert cluster.served == {f"10.96.0.1:{port}": "thief"} | theirs
    assert cluster.catalog.refused == {}


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ({"cluster_ip": "None"}, {}),
        ({"type": "ExternalName"}, {}),
        ({}, {"enable_external_ips": False, "enable_node_port": False}),
    ],
)
def test_addresses_that_are_not_served_anyway_are_refused_to_be_announced(
    spec: Mapping[str, str], options: Mapping[str, bool]
) -> None:
    """Else a headless service would have routers send here what is a node's, or answer for it by ARP."""
    cluster = Cluster(**options)
    web = service("web", "10.96.0.9", external=[NODE_IP, "198.51.100.5"], ingress=[ROUTER_IP])
    web = msgspec.structs.replace(web, spec=msgspec.structs.replace(web.spec, **spec))
    cluster.catalog.upsert_service(web)
    cluster.catalog.reserve("node c/n1", RESERVED)
    assert cluster.reasons("web").keys() == {NODE_IP, ROUTER_IP}
    rows = cluster.catalog.refused[ServiceName("shop", "web")]
    assert all(row.announced_only and row.outcome == "not announced" for row in rows)
    assert cluster.served.keys() <= {"10.96.0.9:443"}
    cluster.catalog.reserve("node c/n1", ())
    assert cluster.catalog.refused == {}


def test_the_cluster_address_of_a_service_of_another_proxy_is_refused_too() -> None:
    cluster = Cluster()
    other = service("other", "10.96.0.1")
    label = {"service.kubernetes.io/service-proxy-name": "another"}
    foreign = msgspec.structs.replace(other, metadata=msgspec.structs.replace(other.metadata, labels=label))
    thief = service("thief", external=["10.96.0.1"])
    cluster.catalog.upsert_service(thief)
    cluster.catalog.upsert_service(foreign)
    assert cluster.served == {}
    cluster.catalog.upsert_service(other)
    assert cluster.served == {"10.96.0.1:443": "other"}


@pytest.mark.parametrize("written", ["{}", "::ffff:{}"])
def test_addresses_of_nodes_and_pods_are_refused_as_external_ones(written: str) -> None:
    cluster = Cluster()
    asked = [written.format(ip) for ip in (NODE_IP, ROUTER_IP, "10.1.0.200", "198.51.100.5")]
    cluster.catalog.upsert_service(service("web", external=asked))
    assert len(cluster.served) == 4
    cluster.catalog.reserve("node c/n1", RESERVED)
    assert len(cluster.served) == 1
    assert sorted(cluster.reasons("web").values()) == [
        "is an address of node n1",
        "is in 10.1.0.0/24, the pods' range of node n1",
        "is the router's address of node n1",
    ]
    cluster.catalog.reserve("node c/n1", ())
    assert len(cluster.served) == 4


def test_a_setting_allows_addresses_of_nodes() -> None:
    cluster = Cluster(enable_external_ips_of_nodes=True)
    web = service("web", external=[NODE_IP, ROUTER_IP, "10.1.0.200"])
    cluster.catalog.reserve("node c/n1", RESERVED)
    cluster.catalog.upsert_service(web)
    assert cluster.served == {f"{NODE_IP}:443": "web"}


def test_load_balancers_may_have_addresses_of_nodes() -> None:
    """Node IPAM gives them; users cannot write a status."""
    cluster = Cluster()
    web = service("web", ingress=[NODE_IP, ROUTER_IP, "10.1.0.200"])
    cluster.catalog.reserve("node c/n1", RESERVED)
    cluster.catalog.upsert_service(web)
    assert cluster.served == {f"{NODE_IP}:443": "web"}
    assert set(cluster.reasons("web")) == {ROUTER_IP, "10.1.0.200"}


@pytest.mark.parametrize(
    ("name", "use"),
    [
        (ServiceName("default", "kubernetes"), "an address of the API server"),
        (ServiceName("kube-system", "kube-dns"), "an address of the cluster's DNS server"),
    ],
)
def test_endpoints_that_the_cluster_relies_on_are_refused(name: ServiceName, use: str) -> None:
    cluster = Cluster(enable_external_ips_of_nodes=True)
    endpoints = slice_(name.name, "198.51.100.1", "198.51.100.2", namespace=name.namespace)
    web = service("web", external=["198.51.100.1"], ingress=["198.51.100.2"])
    cluster.catalog.upsert_service(web)
    cluster.catalog.upsert_slice(endpoints)
    assert cluster.reasons("web") == {"198.51.100.1": f"is {use}"}
    assert cluster.served == {"198.51.100.2:443": "web"}
    cluster.catalog.delete_slice(name, endpoints.name)
    assert len(cluster.served) == 2


SPECIAL = ["127.0.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "::1", "::", "fe80::1", "ff02::1"]


@pytest.mark.parametrize("ip", [*SPECIAL, "::ffff:127.0.0.1"])
def test_special_addresses_are_neither_frontends_nor_backends(ip: str) -> None:
    cluster = Cluster()
    web = service("web", ip, external=[ip], ingress=[ip])
    cluster.catalog.upsert_service(web)
    assert cluster.frontends == {}
    reason = "is loopback, link-local, multicast or unspecified"
    assert cluster.reasons("web") == {str(ip_address(ip)): reason}
    cluster.catalog.upsert_service(service("api", "fd00::5" if ":" in ip else "10.96.0.5"))
    good = "fd00::9" if ":" in ip else "10.0.0.9"
    cluster.catalog.upsert_slice(slice_("api", ip, good))
    (frontend,) = cluster.frontends.values()
    assert [str(one.address.ip) for one in frontend.backends] == [good]


def test_one_node_or_service_more_changes_only_services_that_ask_for_its_addresses() -> None:
    cluster = Cluster()
    for number in range(50):
        cluster.catalog.upsert_service(service(f"s{number}", external=[f"198.51.100.{number}"]))
    more = Reservation(ip_address("198.51.100.7"), Holder.NODE, "an address of node n2")
    cluster.catalog.news()
    cluster.catalog.reserve("node c/n2", [more])
    assert len(cluster.catalog.news()) == 1
    cluster.catalog.news()
    cluster.catalog.upsert_service(service("new", "198.51.100.8"))
    assert len(cluster.catalog.news()) == 1  # takes it over
    assert len(cluster.served) == 49


IPS = ["10.96.0.1", "10.96.0.2", "192.0.2.1", "192.0.2.2", "10.1.0.1", "10.1.0.5", "203.0.113.1", "127.0.0.1"]
asked = st.lists(st.sampled_from(IPS), max_size=2, unique=True)
cluster_ips = st.sampled_from(["", "10.96.0.1", "10.96.0.2"])
services = st.builds(
    lambda name, ip, ext, lb, port: service(name, ip, external=ext, ingress=lb, port=port),
    st.sampled_from(["a", "b", "c"]),
    cluster_ips,
    asked,
    asked,
    st.sampled_from([80, 443]),
)
reservations = st.lists(
    st.builds(
        Reservation,
        st.sampled_from([*map(ip_address, IPS[2:6]), ip_network("10.1.0.0/29"), ip_network("192.0.2.2/31")]),
        st.sampled_from([Holder.NODE, Holder.ROUTER, Holder.POD]),
        st.just("in use"),
    ),
    max_size=3,
)
steps = st.lists(
    st.tuples(st.just("service"), services)
    | st.tuples(st.just("no service"), st.sampled_from(["a", "b", "c"]))
    | st.tuples(st.sampled_from(["node 1", "node 2"]), reservations),
    max_size=14,
)


def wanted(
    known: Mapping[str, Service], held: Mapping[str, list[Reservation]], *, of_nodes: bool
) -> Iterator[tuple[str, str, str]]:
    """Address, port and service of everything that may be served, from nothing but what there is now."""
    in_cluster = {one.spec.cluster_ip for one in known.values()}
    rows = [each for several in held.values() for each in several]

    def kinds(ip: str) -> set[Holder]:
        address = ip_address(ip)
        return {
            each.holder
            for each in rows
            if (address == each.what if isinstance(each.what, type(address)) else address in each.what)  # type: ignore[operator]
        }

    for name, one in known.items():
        port = str((one.spec.ports or ())[0].port)
        if one.spec.cluster_ip:
            yield one.spec.cluster_ip, port, name
        outside = [(ip, of_nodes) for ip in one.spec.external_ips or ()]
        outside += [(each.ip, True) for each in one.status.load_balancer.ingress or ()]
        for ip, may_be_of_node in outside:
            found = kinds(ip)
            if ip in in_cluster or ip == "127.0.0.1" or Holder.ROUTER in found:
                continue
            if not found or (Holder.NODE in found and may_be_of_node):
                yield ip, port, name


@bounded(300)
@given(steps, st.booleans())
def test_what_is_served_depends_on_what_there_is_and_not_on_its_order(script: Any, of_nodes: bool) -> None:
    cluster = Cluster(enable_external_ips_of_nodes=of_nodes)
    known: dict[str, Service] = {}
    held: dict[str, list[Reservation]] = {}
    for what, value in script:
        if what == "service":
            known[value.name] = value
            cluster.catalog.upsert_service(value)
        elif what == "no service":
            known.pop(value, None)
            cluster.catalog.delete_service(ServiceName("shop", value))
        else:
            held[what] = value
            cluster.catalog.reserve(what, value)
        claims: dict[str, set[str]] = {}
        for ip, port, name in wanted(known, held, of_nodes=of_nodes):
            claims.setdefault(f"{ip}:{port}", set()).add(name)
        assert cluster.served.keys() == claims.keys()
        assert all(name in claims[key] for key, name in cluster.served.items())


def host_port(ip: str, port: int = 8080) -> Pod:
    body = {
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {
            "nodeName": "here",
            "containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": port, "hostIP": ip}]}],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.7"}, {"ip": "fd00::7"}]},
    }
    return msgspec.convert(body, Pod)


@pytest.mark.parametrize(
    ("ip", "served"),
    [
        ("", {"0.0.0.0:8080", "[::]:8080", "192.0.2.1:8080"}),
        ("127.0.0.1", {"0.0.0.0:8080"}),
        ("192.0.2.1", {"192.0.2.1:8080"}),
        ("198.51.100.1", {"198.51.100.1:8080"}),  # of a device that serves no node ports
        ("2001:db8::1", {"[2001:db8::1]:8080"}),
        ("192.0.2.2", set()),
        ("10.96.0.1", set()),
        ("8.8.8.8", set()),
        ("::ffff:192.0.2.2", set()),
        ("169.254.169.254", set()),
        ("2001:db8::2", set()),
    ],
)
@pytest.mark.parametrize("first", ["pod", "addresses"])
def test_host_ports_are_served_at_the_nodes_own_addresses_alone(
    ip: str, served: set[str], first: str
) -> None:
    cluster = Cluster()
    node = ServingNode("here", node_port_addresses=(ip_address("192.0.2.1"),))
    own = {ip_address(one) for one in ("192.0.2.1", "198.51.100.1", "2001:db8::1", "127.0.0.1")}
    cluster.catalog.move(node)
    for step in ("pod", "addresses") if first == "pod" else ("addresses", "pod"):
        if step == "pod":
            cluster.catalog.upsert_pod(host_port(ip))
        else:
            cluster.catalog.set_own_addresses(own)
    assert cluster.frontends.keys() == served
    refused = {str(one.address): one.part for several in cluster.catalog.refused.values() for one in several}
    assert refused == ({} if served else {str(ip_address(ip)): HOST_IP})
    if not served:
        cluster.catalog.set_own_addresses({*own, plain(ip_address(ip))})
        assert len(cluster.frontends) == 1, "it came to the node"
    cluster.catalog.delete_pod("shop", "web")
    assert (cluster.frontends, cluster.catalog.refused) == ({}, {})


SERVICES = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  externalIPs: [192.0.2.1, 203.0.113.9]
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [127.0.0.1]}, {addresses: [10.0.0.2]}]
ports: [{port: 8080, protocol: TCP}]
"""


def known_nodes() -> Table[str, ClusterNode]:
    return Table("nodes", key=lambda node: node.full_name)


def nodes_read(table: Table[str, ClusterNode]) -> ReadTable[str, ClusterNode]:
    return table


async def test_refused_service_addresses_are_logged_and_listed_until_the_node_is_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "web.yaml").write_text(SERVICES)
    node = ClusterNode(
        cluster="default",
        name="n1",
        source=Source.CUSTOM_RESOURCE,
        addresses=(
            NodeIP(INTERNAL_IP, ip_address("192.0.2.1")),
            NodeIP(CILIUM_INTERNAL_IP, ip_address("10.1.0.1")),
        ),
    )
    more = [provide(known_nodes, nodes_read)]
    with structlog.testing.capture_logs() as logged:
        async with agent(tmp_path, FakeServiceMaps(), more, kube_proxy_replacement="true") as hive:
            services, refused = (
                hive.get(Table[FrontendKey, ServedFrontend]),
                hive.get(Table[tuple[str, str, str], RefusedAddress]),
            )
            nodes = hive.get(Table[str, ClusterNode])

            def served() -> set[str]:
                return {str(one.key.address.ip) for one in services.all()}

            await eventually(lambda: served() == {"10.96.0.10", "192.0.2.1", "203.0.113.9"})
            with nodes.txn() as rows:
                rows.put(node)
            await eventually(lambda: served() == {"10.96.0.10", "203.0.113.9"})
            (row,) = refused.all()
            assert (str(row.service), str(row.address), row.part) == ("shop/web", "192.0.2.1", EXTERNAL_IPS)
            (line,) = [one for one in logged if one["event"] == "address of a service is refused"]
            assert line["reason"] == row.reason == "is an address of node n1"
            (line,) = [one for one in logged if one["event"] == "backends of a service are refused"]
            assert (line["service"], line["addresses"]) == ("shop/web", "127.0.0.1")
            assert {str(b.address.ip) for one in services.all() for b in one.frontend.backends} == {
                "10.0.0.2"
            }
            with nodes.txn() as rows:
                rows.delete(node.full_name)
            await eventually(lambda: len(served()) == 3 and refused.all() == [])


POD = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec:
  nodeName: NODE
  containers: [{name: c, ports: [{containerPort: 80, hostPort: 8080, hostIP: 192.0.2.9}]}]
status: {phase: Running, podIP: 10.1.0.7, podIPs: [{ip: 10.1.0.7}]}
"""


def devices() -> Table[int, Device]:
    return Table("devices", key=lambda row: row.ifindex)


def device(*addresses: str) -> Device:
    own = tuple(cast("IPv4Interface", ip_interface(one)) for one in addresses)
    return Device(2, "eth0", "", bytes(6), 1500, up=True, addresses=own)


async def test_a_host_port_comes_and_goes_with_the_nodes_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("K8S_NODE_NAME", raising=False)
    (tmp_path / "pod.yaml").write_text(POD.replace("NODE", socket.gethostname()))
    settings = {"enable_host_port": "true", "kube_proxy_replacement": "true"}
    with structlog.testing.capture_logs() as logged:
        async with agent(tmp_path, FakeServiceMaps(), [provide(devices)], **settings) as hive:
            table, refused = (
                hive.get(Table[int, Device]),
                hive.get(Table[tuple[str, str, str], RefusedAddress]),
            )
            with table.txn() as rows:
                rows.put(device("192.0.2.1/24"))
            await eventually(lambda: [one.part for one in refused.all()] == [HOST_IP])
            (line,) = [one for one in logged if one["event"] == "address of a host port is refused"]
            assert (line["pod"], line["address"]) == ("shop/web", "192.0.2.9")
            with table.txn() as rows:
                rows.put(device("192.0.2.1/24", "192.0.2.9/32"))
            services = hive.get(Table[FrontendKey, ServedFrontend])
            await eventually(lambda: {str(one.key.address.ip) for one in services.all()} == {"192.0.2.9"})
            assert refused.all() == []
