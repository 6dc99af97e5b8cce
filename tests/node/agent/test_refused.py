"""Services without endpoints refuse connections from every client, at every address."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cells.maps.map import open_map
from hive.lab import agent_process, pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.requests import send_requests
from tests.node.agent.named_servers import joined, served
from tests.node.agent.node_ports import NODE6, OUTSIDE, TARGET, command, give_addresses
from tests.support.agents import known_pods, serving
from tests.support.cgroups import join, unified
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

PORT, NODE_PORT = 8200, 30200
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
KINDS = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM}
CLUSTER = {4: "10.96.2.1", 6: "fd00:96:2::1"}
BALANCER = {4: "192.0.2.90", 6: "2001:db8:90::1"}
EXTERNAL = {4: "192.0.2.91", 6: "2001:db8:91::1"}
NODE = {4: NODE_ADDRESS, 6: NODE6}
HEADLESS, PROXY_NAME = "service.kubernetes.io/headless", "service.kubernetes.io/service-proxy-name"
SETTINGS = ("--enable-ipv6=true", "--ipv6-range=fd00:5::/112", "--kube-proxy-replacement=true")


def service(labels: str = "") -> str:
    return f"""
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop, labels: {{{labels}}}}}
spec:
  type: LoadBalancer
  clusterIP: {CLUSTER[4]}
  clusterIPs: ["{CLUSTER[4]}", "{CLUSTER[6]}"]
  externalIPs: ["{EXTERNAL[4]}", "{EXTERNAL[6]}"]
  ports:
  - {{name: tcp, port: {PORT}, nodePort: {NODE_PORT}, protocol: TCP}}
  - {{name: udp, port: {PORT}, nodePort: {NODE_PORT}, protocol: UDP}}
status: {{loadBalancer: {{ingress: [{{ip: "{BALANCER[4]}"}}, {{ip: "{BALANCER[6]}"}}]}}}}
---"""


def slices(backends: dict[int, str], labels: str = "") -> str:
    return "".join(
        f"""
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-{version}, namespace: shop, labels: {{kubernetes.io/service-name: web, {labels}}}}}
addressType: IPv{version}
endpoints: [{f'{{addresses: ["{ip}"]}}' if ip else ""}]
ports: [{{name: tcp, port: {TARGET}, protocol: TCP}}, {{name: udp, port: {TARGET}, protocol: UDP}}]
---"""
        for version, ip in backends.items()
    )


def asked(group: Path | None, family: int, kind: int, to: tuple[str, int]) -> str:
    """The name of the error that a client gets; with a control group its socket is served there."""
    if group is not None:
        join(group)
    with socket.socket(family, kind) as client:
        client.settimeout(5)
        try:
            client.connect(to)
            client.send(b"?")
            client.recv(1)
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return errno.errorcode[error.errno or 0]
    return "an answer"


@contextmanager
def clients(lab: Lab) -> Iterator[dict[str, tuple[Namespaces, Path | None]]]:
    """Where clients are, and the control group by which they are served at their sockets."""
    group = unified() / f"hive-lab-{lab.name}"
    with lab.open() as host, lab.open_pod("client") as pod, lab.open_outside() as outside:
        yield {
            "a pod, packet by packet": (pod, None),
            "a pod, at its socket": (pod, group),
            "the node": (host, group),
            "outside": (outside, None),
        }


def targets(who: str, version: int) -> dict[str, tuple[str, int]]:
    """What a client may ask."""
    found = {
        "the node port": (NODE[version], NODE_PORT),
        "the load balancer": (BALANCER[version], PORT),
        "the external address": (EXTERNAL[version], PORT),
    }
    return found if who == "outside" else found | {"the cluster address": (CLUSTER[version], PORT)}


def outcomes(lab: Lab) -> dict[tuple[str, str, str], str]:
    """What each client gets by each address, family and protocol."""
    with clients(lab) as places:
        return {
            (who, what, f"IPv{version} {kind}"): place.run(asked, group, family, KINDS[kind], to)
            for who, (place, group) in places.items()
            for version, family in FAMILIES.items()
            for what, to in targets(who, version).items()
            for kind in KINDS
        }


def prepare(lab: Lab) -> None:
    give_addresses(lab)
    with lab.open_outside() as outside:
        for each in (BALANCER, EXTERNAL):
            outside.run(command, f"route add {each[4]} via {NODE_ADDRESS}")
            outside.run(command, f"route add {each[6]} via {NODE6}")


@pytest.mark.parametrize(
    ("backends", "more"),
    [
        ({4: "", 6: ""}, []),
        ({}, ["--bpf-lb-acceleration=generic"]),
        ({4: "", 6: ""}, ["--enable-host-legacy-routing=true", "--enable-endpoint-routes=true"]),
    ],
    ids=["slices without endpoints", "no slice, before the stack", "by the host's stack"],
)
def test_a_service_without_endpoints_refuses(
    node: Lab, tmp_path: Path, backends: dict[int, str], more: list[str]
) -> None:
    prepare(node)
    (tmp_path / "web.yaml").write_text(service() + slices(backends))
    known_pods(tmp_path, "client")
    serving(node, f"--manifests-dir={tmp_path}", *SETTINGS, *more)
    pods.add(node, "client")

    def everybody_is_refused() -> bool:
        assert {key: got for key, got in outcomes(node).items() if got != "ECONNREFUSED"} == {}
        return True

    eventually(everybody_is_refused)


def test_a_service_without_endpoints_drops_packets_where_configured(node: Lab, tmp_path: Path) -> None:
    prepare(node)
    (tmp_path / "web.yaml").write_text(service() + slices({4: "", 6: ""}))
    known_pods(tmp_path, "client")
    serving(node, f"--manifests-dir={tmp_path}", *SETTINGS, "--service-no-backend-response=drop")
    pods.add(node, "client")
    wanted = {
        "a pod, packet by packet": "no answer",
        "a pod, at its socket": "EHOSTUNREACH",
        "the node": "EHOSTUNREACH",
        "outside": "no answer",
    }
    with clients(node) as places:
        for version, family in FAMILIES.items():

            def silent(family: int = family, to: tuple[str, int] = (NODE[version], NODE_PORT)) -> bool:
                got = {
                    who: place.run(asked, group, family, socket.SOCK_STREAM, to)
                    for who, (place, group) in places.items()
                }
                assert got == wanted
                return True

            eventually(silent)


@contextmanager
def answering(lab: Lab, folder: Path, *more: str) -> Iterator[pods.Attached]:
    """A pod that answers, the only endpoint of the service."""
    prepare(lab)
    known_pods(folder, "client", "server")
    serving(lab, f"--manifests-dir={folder}", *SETTINGS, *more)
    pods.add(lab, "client")
    pod = pods.add(lab, "server")
    with lab.open_pod("server") as place:
        child = served(place, "server", socket.AF_INET6)
        (folder / "web.yaml").write_text(service() + slices(addresses(pod)))
        yield pod
        child.kill()


def addresses(pod: pods.Attached) -> dict[int, str]:
    assert pod.ipv4
    assert pod.ipv6
    return {4: pod.ipv4, 6: pod.ipv6}


def answers(place: Namespaces, group: Path | None, to: tuple[str, int]) -> str:
    """Who answers a client, or the error that it gets."""
    found = place.run(joined, group, *to) if group is not None else place.run(send_requests, to, 1)
    return (found.failed or found.servers)[0]


def comes(place: Namespaces, group: Path | None, to: tuple[str, int], wanted: str) -> None:
    """Wait until a client gets that."""
    eventually(lambda: answers(place, group, to).endswith(wanted))


def test_an_external_address_that_no_node_has_leads_to_the_endpoints(node: Lab, tmp_path: Path) -> None:
    with answering(node, tmp_path), clients(node) as places:
        for place, group in places.values():
            for version in FAMILIES:
                comes(place, group, (EXTERNAL[version], PORT), "server")


def test_an_external_address_that_is_the_nodes_own_is_refused(node: Lab, tmp_path: Path) -> None:
    """It would take the node's own ports from it; the rest of the service is served."""
    with answering(node, tmp_path), clients(node) as places:
        text = (tmp_path / "web.yaml").read_text()
        own = text.replace("externalIPs: [", f'externalIPs: ["{NODE_ADDRESS}", ')
        (tmp_path / "web.yaml").write_text(own)
        line = "address of a service is refused"
        eventually(lambda: line in agent_process.log_end(node, 200))
        for place, group in places.values():
            comes(place, group, (EXTERNAL[4], PORT), "server")
            assert not answers(place, group, (NODE_ADDRESS, PORT)).endswith("server")


def test_an_external_address_of_another_owner_is_left_to_it(node: Lab, tmp_path: Path) -> None:
    mitigated = "--disable-external-ip-mitigation=false"
    with answering(node, tmp_path, mitigated), clients(node) as places:
        outside = places.pop("outside")[0]
        for version in FAMILIES:
            own_externally(node, outside, version)
        owner = served(outside, "owner", socket.AF_INET6, PORT)
        for place, group in places.values():
            for version in FAMILIES:
                comes(place, group, (CLUSTER[version], PORT), "server")
                comes(place, group, (EXTERNAL[version], PORT), "owner")
        owner.kill()


def own_externally(lab: Lab, outside: Namespaces, version: int) -> None:
    """The external address is one of the world outside."""
    via = {4: NODE_ADDRESS, 6: NODE6}[version]
    outside.run(command, f"route del {EXTERNAL[version]} via {via}")
    outside.run(command, f"address add {EXTERNAL[version]} dev lo{' nodad' * (version == 6)}")
    with lab.open() as host:
        host.run(command, f"route add {EXTERNAL[version]} via {OUTSIDE[version]}")


def test_labels_decide_at_run_time_who_serves(node: Lab, tmp_path: Path) -> None:
    """A service of another proxy is left alone, and slices for no proxy are no endpoints."""
    with answering(node, tmp_path) as server:
        follow_labels(node, tmp_path, server)


def follow_labels(node: Lab, tmp_path: Path, server: pods.Attached) -> None:
    file = tmp_path / "web.yaml"
    backends = slices(addresses(server))

    def all_get(wanted: str) -> None:
        with clients(node) as places:
            for who, (place, group) in places.items():
                what = "the node port" if who == "outside" else "the cluster address"
                for version in FAMILIES:
                    comes(place, group, targets(who, version)[what], wanted)

    all_get("server")
    for labels in (f'{HEADLESS}: ""', f"{PROXY_NAME}: other"):
        file.write_text(service(labels) + backends)
        with node.open() as place:
            eventually(partial(nothing_in_maps, place))
        file.write_text(service() + backends)
        all_get("server")
    file.write_text(service() + slices(addresses(server), f'{HEADLESS}: ""'))
    all_get("refused")
    file.write_text(service() + backends)
    all_get("server")


def nothing_in_maps(place: Namespaces) -> bool:
    """Whether no service is served, of either family."""
    return place.run(entries) == 0


def entries() -> int:
    """Of the maps of both families."""
    found = 0
    for version in FAMILIES:
        with open_map(Path(f"/sys/fs/bpf/tc/globals/cilium_lb{version}_services_v2")) as services:
            found += sum(1 for _ in services.items())
    return found
