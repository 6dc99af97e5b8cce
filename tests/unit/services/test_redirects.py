"""Local redirect policies, from manifests to what is served, reported and skipped."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog

from cells.api.operations.services import redirect_model
from cells.cluster.nodes.node import INTERNAL_IP, NodeIP
from cells.kubernetes.objects.cilium_policy import CiliumLocalRedirectPolicy
from cells.kubernetes.objects.core import Pod, Service
from cells.maps.records.flows import SkipLbKey
from cells.observe import metrics
from cells.services import Frontend, FrontendKey, LoadBalancerOptions, ServiceName, ServiceType, ServingNode
from cells.services.control import LocalRedirect, ServedFrontend
from cells.services.model.claims import node_reservations
from cells.services.model.redirect import read_redirect
from cells.services.redirect_skips import RedirectSkip, skip_target, skips
from lifecycle import BatchError, Table
from lifecycle.testing import eventually
from tests.support.catalog import LoneCatalog
from tests.support.fake_map import SPECS, FakeMap
from tests.support.ports import free_port
from tests.support.scrape import scraped
from tests.unit.ciliumendpoint.endpoints import endpoint
from tests.unit.services.agent import SERVICE, SLICE, FakeServiceMaps, agent

pytestmark = pytest.mark.anyio
HERE = ServingNode("here")

POLICY = """
apiVersion: cilium.io/v2
kind: CiliumLocalRedirectPolicy
metadata: {name: near, namespace: shop, uid: u-1}
spec:
  redirectFrontend: {serviceMatcher: {serviceName: web, namespace: shop}}
  redirectBackend:
    localEndpointSelector: {matchLabels: {app: near}}
    toPorts: [{port: "9090", protocol: TCP}]
  skipRedirectFromBackend: true
"""
MATCHER = "serviceMatcher: {serviceName: web, namespace: shop}"
POD = """
apiVersion: v1
kind: Pod
metadata: {name: near-1, namespace: shop, labels: {app: near}}
spec: {nodeName: NODE, containers: [{name: main}]}
status:
  phase: Running
  podIP: 10.1.0.7
  podIPs: [{ip: 10.1.0.7}]
  conditions: [{type: Ready, status: "READY"}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "slice.yaml").write_text(SLICE)
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


def pod(folder: Path, *, ready: bool, node: str = "") -> None:
    text = POD.replace("NODE", node or socket.gethostname()).replace("READY", str(ready))
    (folder / "pod.yaml").write_text(text)


async def test_a_service_goes_to_the_nodes_pods_while_one_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("K8S_NODE_NAME", raising=False)
    async with agent(folder, FakeServiceMaps(), enable_local_redirect_policy="true") as hive:
        served, redirects = (
            hive.get(Table[FrontendKey, ServedFrontend]),
            hive.get(Table[ServiceName, LocalRedirect]),
        )

        def type_and_backends() -> tuple[str, set[str]]:
            (one,) = served.all()
            return one.frontend.type.text, {str(each.address.ip) for each in one.frontend.backends}

        own = ("ClusterIP", {"10.0.0.1", "10.0.0.2"})
        await eventually(lambda: type_and_backends() == own)
        pod(folder, ready=True, node="another")
        pod(folder, ready=True)
        await eventually(lambda: type_and_backends() == ("LocalRedirect", {"10.1.0.7"}))
        (redirect,) = redirects.all()
        model = msgspec.json.decode(msgspec.json.encode(redirect_model(redirect)))
        assert model == {
            "uid": "u-1",
            "name": "near",
            "namespace": "shop",
            "frontend-type": "clusterIP + all svc ports",
            "lrp-type": "svc",
            "service-id": "shop/web",
            "frontend-mappings": [
                {
                    "frontend-address": {"ip": "10.96.0.10", "port": 80, "protocol": "TCP"},
                    "backends": [
                        {"pod-id": "shop/near-1", "backend-address": {"ip": "10.1.0.7", "port": 9090}}
                    ],
                }
            ],
        }
        key = SkipLbKey(77, ip_address("10.96.0.10"), 80)
        mine = endpoint(1, ipv4=IPv4Address("10.1.0.7"), ipv6=None, netns_cookie=77)
        assert skips(
            [redirect], [mine, endpoint(2, ipv4=IPv4Address("10.1.0.8"), ipv6=None, netns_cookie=78)]
        ).keys() == {key}
        pod(folder, ready=False)
        await eventually(lambda: type_and_backends() == own)
        assert skips(redirects.all(), [mine]) == {}
        (folder / "policy.yaml").unlink()
        await eventually(lambda: redirects.all() == [])


async def test_an_unserviceable_redirect_policy_is_reported(folder: Path) -> None:
    (folder / "policy.yaml").write_text(POLICY.replace("namespace: shop}}", "namespace: other}}"))
    async with agent(folder, FakeServiceMaps(), enable_local_redirect_policy="true") as hive:
        redirects = hive.get(Table[ServiceName, LocalRedirect])
        await eventually(lambda: any(one.error for one in redirects.all()))
        assert redirects.all()[0].error == "serviceMatcher.namespace=other: expected the policy's own, shop"


async def test_ports_that_fit_no_backend_port_are_reported(folder: Path) -> None:
    ports = 'toPorts: [{name: a, port: "80", protocol: TCP}, {name: b, port: "81", protocol: TCP}]'
    backend = 'toPorts: [{name: b, port: "9090", protocol: TCP}]'
    text = POLICY.replace(MATCHER, f"{MATCHER[:-1]}, {ports}}}")
    (folder / "policy.yaml").write_text(text.replace('toPorts: [{port: "9090", protocol: TCP}]', backend))
    with structlog.testing.capture_logs() as logs:
        async with agent(folder, FakeServiceMaps(), enable_local_redirect_policy="true") as hive:
            redirects = hive.get(Table[ServiceName, LocalRedirect])
            await eventually(lambda: bool(redirects.all()))
    (one,) = [each for each in logs if each["event"] == "ports of a local redirect policy are not redirected"]
    assert (one["policy"], one["ports"]) == ("shop/near", "a (80)")


async def test_without_the_setting_policies_are_not_followed(folder: Path) -> None:
    pod(folder, ready=True)
    async with agent(folder, FakeServiceMaps()) as hive:
        served = hive.get(Table[FrontendKey, ServedFrontend])
        await eventually(lambda: bool(served.all()))
        assert [one.frontend.type for one in served.all()] == [ServiceType.CLUSTER_IP]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("redirectFrontend: {" + MATCHER + "}", "redirectFrontend: {}", "expected either"),
        ('toPorts: [{port: "9090", protocol: TCP}]', "toPorts: []", "at least one port"),
        ('port: "9090"', "port: http", "expected a number"),
        ("protocol: TCP", "protocol: SCTP", "expected TCP or UDP"),
        (
            "serviceMatcher: {serviceName: web, namespace: shop}",
            "addressMatcher: {ip: x, toPorts: []}",
            "an IP",
        ),
    ],
)
def test_an_invalid_redirect_policy_is_one_line(old: str, new: str, message: str) -> None:
    text = (
        POLICY.replace("redirectFrontend: {" + old + "}", f"redirectFrontend: {new}") if new == "{}" else ""
    )
    policy = msgspec.yaml.decode(text or POLICY.replace(old, new), type=CiliumLocalRedirectPolicy)
    with pytest.raises(ValueError, match=message):
        read_redirect(policy)


ADDRESS = POLICY.replace(MATCHER, 'addressMatcher: {ip: "ADDRESS", toPorts: [{port: "53", protocol: TCP}]}')


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.96.0.1", "is the cluster address of default/kubernetes"),
        ("10.96.0.10", ""),  # the policy's own namespace
        ("192.0.2.1", "is an address of node n1"),
        ("10.1.0.5", "in 10.1.0.0/24, the pods' range of node n1"),
        ("127.0.0.1", "is loopback, multicast or unspecified"),
        ("169.254.169.254", ""),  # metadata of a cloud
        ("203.0.113.5", ""),
    ],
)
@pytest.mark.parametrize("first", ["policy", "others"])
def test_a_policy_redirects_no_address_of_others_in_the_cluster(
    address: str, reason: str, first: str
) -> None:
    catalog = LoneCatalog(LoadBalancerOptions(enable_local_redirect_policy=True), HERE)
    policy = msgspec.yaml.decode(ADDRESS.replace("ADDRESS", address), type=CiliumLocalRedirectPolicy)
    own = msgspec.yaml.decode(SERVICE, type=Service)
    other = msgspec.yaml.decode(
        SERVICE.replace("10.96.0.10", "10.96.0.1").replace("shop", "default").replace("web", "kubernetes"),
        type=Service,
    )
    node = [NodeIP(INTERNAL_IP, ip_address("192.0.2.1"))], [ip_network("10.1.0.0/24")]
    ready = msgspec.yaml.decode(POD.replace("NODE", HERE.name).replace("READY", "True"), type=Pod)

    def redirecting() -> None:
        catalog.upsert_pod(ready)
        catalog.upsert_redirect(read_redirect(policy))

    def reserving() -> None:
        catalog.upsert_service(own)
        catalog.upsert_service(other)
        catalog.reserve("node n1", node_reservations("n1", *node))

    steps = (redirecting, reserving)
    for step in steps if first == "policy" else reversed(steps):
        step()
    name = ServiceName("shop", "near")
    assert reason in catalog.refused_redirects.get(name, "")
    assert bool(catalog.redirected[name]) is not bool(reason)
    if reason:
        catalog.delete_service(ServiceName("default", "kubernetes"))
        catalog.reserve("node n1", ())
        assert bool(catalog.redirected[name]) is (address != "127.0.0.1"), "once it is free it is redirected"
    catalog.delete_redirect(name)
    assert catalog.refused_redirects == {}


async def test_a_refused_address_is_in_the_table_and_in_the_log(folder: Path) -> None:
    (folder / "policy.yaml").write_text(ADDRESS.replace("ADDRESS", "10.96.0.77"))
    other = SERVICE.replace("10.96.0.10", "10.96.0.77").replace("shop", "default")
    (folder / "other.yaml").write_text(other)
    pod(folder, ready=True)
    with structlog.testing.capture_logs() as logged:
        async with agent(folder, FakeServiceMaps(), enable_local_redirect_policy="true") as hive:
            redirects = hive.get(Table[ServiceName, LocalRedirect])
            error = "addressMatcher.ip=10.96.0.77 is the cluster address of default/web"
            await eventually(lambda: [one.error for one in redirects.all()] == [error])
            (line,) = [one for one in logged if one["event"] == "local redirect policy refused"]
            assert (line["policy"], line["error"]) == ("shop/near", error)
            (folder / "other.yaml").unlink()
            await eventually(lambda: [one.error for one in redirects.all()] == [""])


async def test_skips_are_in_the_map_of_their_family_and_a_full_map_takes_the_others() -> None:
    maps: Any = SimpleNamespace(skip_lb4=FakeMap(SPECS["skip_lb4"]), skip_lb6=FakeMap(SPECS["skip_lb6"]))
    target = skip_target(maps)
    four, six = (SkipLbKey(7, ip_address(ip), 80) for ip in ("169.254.169.254", "fd00::1"))
    await target.put({key: RedirectSkip(key) for key in (four, six)})
    assert (set(maps.skip_lb4.raw), set(maps.skip_lb6.raw)) == ({four.pack()}, {six.pack()})
    observed = await target.observe()
    assert all(target.matches(RedirectSkip(key), observed[key]) for key in (four, six))
    await target.drop([six])
    assert set(await target.observe()) == {four}
    room = SPECS["skip_lb4"].max_entries - 1
    more = [SkipLbKey(8 + each, four.ip, 80) for each in range(room + 1)]
    with pytest.raises(BatchError) as raised:
        await target.put({key: RedirectSkip(key) for key in (*more, six)})
    assert set(raised.value.failures) == {more[-1]}
    assert "it is full" in str(raised.value.failures[more[-1]])
    assert set(await target.observe()) == {four, six, *more[:-1]}


DNS, DNS_TCP, METRICS = "dns 53 UDP", "dns-tcp 53 TCP", "metrics 9153 TCP"


def ports_of(form: str, *texts: str) -> str:
    """Ports as a manifest has them, from ``name number protocol``; ``form`` of the number."""
    words = [text.split(" ") for text in texts]
    return "[" + ", ".join(f'{{name: "{a}", {form % b}, protocol: {c}}}' for a, b, c in words) + "]"


@pytest.mark.parametrize(
    ("service", "matcher", "backends", "redirected"),
    [
        ((DNS, DNS_TCP, METRICS), (), ("dns-tcp 1053 TCP",), {"53/TCP": 1053}),
        ((DNS, DNS_TCP, METRICS), (), (" 1053 TCP",), {}),  # several are paired by name alone
        ((DNS, DNS_TCP), (), ("dns-tcp 1053 TCP", "dns 1054 UDP"), {"53/UDP": 1054, "53/TCP": 1053}),
        (("web 80 TCP",), (), ("http 8080 TCP", "web 8081 TCP"), {"80/TCP": 8081}),
        ((" 80 TCP",), (), ("http 8080 TCP", "web 8081 TCP"), {"80/TCP": 8080}),
        (("web 80 TCP",), (), (" 8080 UDP",), {}),
        ((DNS, DNS_TCP, METRICS), (DNS,), (" 1053 UDP",), {"53/UDP": 1053}),
        ((DNS, DNS_TCP, METRICS), (DNS, METRICS), (DNS, DNS_TCP), {"53/UDP": 53}),
    ],
)
def test_ports_of_a_redirect_are_paired_by_name(
    service: tuple[str, ...], matcher: tuple[str, ...], backends: tuple[str, ...], redirected: dict[str, int]
) -> None:
    catalog = LoneCatalog(LoadBalancerOptions(enable_local_redirect_policy=True), HERE)
    own = 'toPorts: [{port: "9090", protocol: TCP}]'
    text = POLICY.replace(own, "toPorts: " + ports_of('port: "%s"', *backends))
    named = MATCHER[:-1] + ", toPorts: " + ports_of('port: "%s"', *matcher) + "}"
    policy = msgspec.yaml.decode(text.replace(MATCHER, named), type=CiliumLocalRedirectPolicy)
    catalog.upsert_redirect(read_redirect(policy))
    text = SERVICE.replace("[{name: http, port: 80, protocol: TCP}]", ports_of("port: %s", *service))
    catalog.upsert_service(msgspec.yaml.decode(text, type=Service))
    container = f"{{name: main, ports: {ports_of('containerPort: %s', DNS, DNS_TCP, METRICS)}}}"
    text = POD.replace("{name: main}", container).replace("NODE", HERE.name).replace("READY", "True")
    catalog.upsert_pod(msgspec.yaml.decode(text, type=Pod))
    found = {
        f"{one.key.address.port}/{'UDP' if one.key.address.protocol == 17 else 'TCP'}": [
            each.address.port for each in one.backends
        ]
        for one in catalog.frontends.all()
        if one.type is ServiceType.LOCAL_REDIRECT
    }
    assert found == {port: [number] for port, number in redirected.items()}


async def test_redirects_and_local_services_are_counted_when_they_come_and_go(folder: Path) -> None:
    port = free_port()
    given = {"enable_local_redirect_policy": "true", "prometheus_serve_addr": f":{port}"}
    local = SERVICE + "  internalTrafficPolicy: Local\n"
    async with agent(folder, FakeServiceMaps(), [metrics.cell], **given) as hive:
        redirects, known = hive.get(Table[ServiceName, LocalRedirect]), hive.get(Table[FrontendKey, Frontend])
        await eventually(lambda: [row.error for row in redirects.all()] == [""])
        (folder / "policy.yaml").write_text(POLICY.replace("app: near", "app: other"))
        (folder / "service.yaml").write_text(local)
        await eventually(lambda: [row.int_local for row in known.all()] == [True])
        (folder / "service.yaml").write_text(SERVICE)
        (folder / "policy.yaml").unlink()
        await eventually(lambda: [row.int_local for row in known.all()] == [False] and not redirects.all())
        found = await scraped(port)
    for name in ("local_redirect_policies", "internal_traffic_policy_services"):
        counts = found[f"cilium_feature_network_policies_{name}_total"]
        assert counts == {("add",): 1, ("delete",): 1}, name
