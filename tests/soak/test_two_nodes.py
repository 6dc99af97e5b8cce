"""Two nodes joined by a tunnel and etcd, with counted traffic both ways, through many failures.

Survivable faults lose no packets; removed state is restored; health shows the fault until then.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.cluster.store import PORT
from hive.lab.demo.upgrade import second_build
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import ping
from tests.support.two_nodes import SETTINGS, asked, joined_by_etcd
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(1000)]

NAME = f"trouble-{os.getpid()}"
RATE = 500.0
IPCACHE = Path("/sys/fs/bpf/tc/globals/cilium_ipcache")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with joined_by_etcd(NAME) as found:
        yield found


def address(lab: Lab) -> str:
    (one,) = asked(lab, "/v1/endpoint")
    return str(one["status"]["networking"]["addressing"][0]["ipv4"])


def reaches(lab: Lab, target: str) -> bool:
    with lab.open_pod(lab.pods()[0]) as pod:
        return bool(pod.run(ping, target, 1))


def both_reach(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab, other in ((first, second), (second, first)):
        eventually(partial(reaches, lab, address(other)), within=90)


class Counted:
    """What was sent and what came, each way."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []

    @property
    def lost(self) -> list[int]:
        return [sent - received for sent, received in zip(self.sent, self.received, strict=True)]


@contextmanager
def traffic(cluster: Cluster) -> Iterator[Counted]:
    """RATE packets a second from each pod to the other."""
    counted = Counted()
    first, second = cluster.nodes()
    flows = []
    for lab, other in ((first, second), (second, first)):
        with other.open_pod(other.pods()[0]) as there, lab.open_pod(lab.pods()[0]) as here:
            with inside(there):
                sock = udp_socket()
            with sock:
                incoming = there.start(udp_receiver, sock)
                outgoing = here.start(udp_sender, (address(other), sock.getsockname()[1]), RATE)
        flows.append((outgoing, incoming))
    try:
        yield counted
        for outgoing, _ in flows:
            counted.sent.append(outgoing.finish(within=30).packets)
        for _, incoming in flows:
            counted.received.append(incoming.finish(within=30).packets)
    finally:
        for pair in flows:
            for child in pair:
                child.kill()


def restarted(cluster: Cluster, lab: Lab, *more: str) -> None:
    agent_process.crash(lab)
    agent_process.wait_ready(lab, agent_process.start(lab, *cluster.settings((*SETTINGS, *more))))


def test_nothing_is_lost_by_agents_killed_and_generations_changed_in_turn(cluster: Cluster) -> None:
    with traffic(cluster) as counted:
        for lab in cluster.nodes() * 3:
            restarted(cluster, lab)
        for lab in (cluster.nodes() * 2)[:3]:  # there and back: six generations
            restarted(cluster, lab, f"--datapath-object={second_build(lab)}")
            restarted(cluster, lab)
    assert min(counted.sent) > 1000
    assert counted.lost == [0, 0]


def gateway(path: str, body: dict[str, Any]) -> Any:
    """etcd's API as JSON; inside its network."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v3/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  # the lab's own etcd
        return json.load(answer)


def compact() -> None:
    revision = gateway("kv/range", {"key": "AA=="})["header"]["revision"]
    gateway("kv/compaction", {"revision": revision, "physical": True})


def store_is(lab: Lab, state: str) -> bool:
    return bool(asked(lab, "/v1/healthz")["kvstore"]["state"] == state)


def test_nothing_is_lost_by_what_becomes_of_etcd(cluster: Cluster) -> None:
    store = cluster.store
    with traffic(cluster) as counted:
        store.crash()
        store.start()
        with cluster.network.open() as network:
            network.run(compact)
        store.crash()
        store.start()
        store.freeze()
        frozen = time.monotonic()
        eventually(lambda: all(store_is(lab, "Failure") for lab in cluster.nodes()), within=120)
        restarted(cluster, cluster.nodes()[0])  # also while the server is away
        eventually(lambda: time.monotonic() - frozen > 60, within=70, every=0.5)
        store.thaw()
        eventually(lambda: all(store_is(lab, "Ok") for lab in cluster.nodes()), within=60)
    assert counted.lost == [0, 0]
    both_reach(cluster)


def without_half() -> int:
    """Delete every other row of the ipcache; how many."""
    with open_map(IPCACHE) as table:
        vanished = [key for key, _ in table.items()][::2]
        for key in vanished:
            table.delete(key)
    return len(vanished)


def rows() -> dict[str, IpcacheValue]:
    with open_map(IPCACHE) as table:
        return {
            str(IpcacheKey.unpack(key).network): IpcacheValue.unpack(value) for key, value in table.items()
        }


def in_node(lab: Lab, fn: Callable[[], Any]) -> Any:
    with lab.open() as node:
        return node.run(fn)


def test_half_of_an_ipcache_comes_back(cluster: Cluster) -> None:
    first = cluster.nodes()[0]
    before = in_node(first, rows)
    assert in_node(first, without_half) >= 3
    eventually(lambda: in_node(first, rows) == before, within=90)
    both_reach(cluster)


def removed(what: str) -> None:
    """Deletes the tunnel's device, or the route over cilium_host to the other node's pods."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        if what == "device":
            ip.link("del", index=ip.link_lookup(ifname="cilium_vxlan")[0])
            return
        (host,) = ip.link_lookup(ifname="cilium_host")
        (route,) = [
            each for each in ip.get_routes(family=socket.AF_INET, oif=host, proto=2) if each["dst_len"] == 24
        ]
        ip.route("del", dst=f"{route.get_attr('RTA_DST')}/24", oif=host, proto=2)


def host_reaches(lab: Lab, target: str) -> bool:
    return bool(in_node(lab, partial(ping, target, 1)))


def test_a_manually_removed_route_is_restored_without_loss(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    with traffic(cluster) as counted:
        in_node(first, partial(removed, "route"))
        eventually(partial(host_reaches, first, address(second)), within=30)
    assert counted.lost == [0, 0]


def test_a_manually_removed_device_is_created_again(cluster: Cluster) -> None:
    """What passes meanwhile is lost: there is no device. Nothing is once it is back."""
    first, _ = cluster.nodes()
    with traffic(cluster) as counted:
        in_node(first, partial(removed, "device"))
        both_reach(cluster)
    assert all(0 < lost < sent / 2 for lost, sent in zip(counted.lost, counted.sent, strict=True))
    with traffic(cluster) as counted:
        both_reach(cluster)
    assert counted.lost == [0, 0]


def uplink(up: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname="uplink")
        ip.link("set", index=index, state=up)
        if up == "up":
            ip.route("replace", dst="default", gateway="192.168.50.1")


def test_a_node_that_was_cut_off_is_back_as_soon_as_its_link(cluster: Cluster) -> None:
    second = cluster.nodes()[1]
    in_node(second, partial(uplink, "down"))
    eventually(lambda: store_is(second, "Failure"), within=120)
    in_node(second, partial(uplink, "up"))
    both_reach(cluster)
    eventually(lambda: store_is(second, "Ok"), within=60)


REMOVED = 600.0
"""Seconds that a node is away, ten times as long as its keys last without it."""


def knows(lab: Lab, other: Lab) -> bool:
    return f"default/{other.name}" in json.dumps(asked(lab, "/v1/cluster/nodes"))


def test_a_node_is_published_again_after_ten_minutes_offline(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab in (first, second):
        restarted(cluster, lab, "--kvstore-lease-ttl=60s")
    both_reach(cluster)
    numbers = [one["status"]["identity"]["id"] for one in asked(second, "/v1/endpoint")]
    in_node(second, partial(uplink, "down"))
    vanished = time.monotonic()
    eventually(lambda: not knows(first, second), within=180, every=0.5)
    assert address(second) + "/32" not in in_node(first, rows)
    eventually(lambda: time.monotonic() - vanished > REMOVED, within=REMOVED + 10, every=1)
    in_node(second, partial(uplink, "up"))
    eventually(lambda: knows(first, second), within=60)
    both_reach(cluster)
    assert [one["status"]["identity"]["id"] for one in asked(second, "/v1/endpoint")] == numbers
    with traffic(cluster) as counted:
        for lab in (first, second):
            restarted(cluster, lab)
    assert counted.lost == [0, 0]


def test_a_second_node_with_the_same_range_takes_nothing(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    place = cluster.place(second)
    cidr = {"IP": place.pod_cidrs[0].partition("/")[0], "Mask": "////AA=="}
    addresses = [{"Type": "InternalIP", "IP": "192.168.50.99"}]
    claim = {"Name": "zzz", "Cluster": "default", "IPv4AllocCIDR": cidr, "IPAddresses": addresses}
    with traffic(cluster) as counted:
        with cluster.network.open() as network:
            network.run(gateway, "kv/put", encoded("cilium/state/nodes/v1/default/zzz", json.dumps(claim)))
        eventually(lambda: "default/zzz" in json.dumps(asked(first, "/v1/cluster/nodes")))
        eventually(lambda: "is claimed by" in json.dumps(asked(first, "/v1/healthz")), within=30)
        assert str(in_node(first, rows)[place.pod_cidrs[0]].tunnel_endpoint) == place.ipv4
        with cluster.network.open() as network:
            network.run(gateway, "kv/deleterange", encoded("cilium/state/nodes/v1/default/zzz"))
        eventually(lambda: "default/zzz" not in json.dumps(asked(first, "/v1/cluster/nodes")))
    assert counted.lost == [0, 0]


def encoded(key: str, value: str = "") -> dict[str, str]:
    import base64

    found = {"key": base64.b64encode(key.encode()).decode()}
    return found | ({"value": base64.b64encode(value.encode()).decode()} if value else {})


def moved(old: str, new: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname="uplink")
        ip.addr("del", index=index, address=old, prefixlen=24)
        ip.addr("add", index=index, address=new, prefixlen=24)
        ip.route("replace", dst="default", gateway="192.168.50.1")


def test_a_changed_node_address_is_followed(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    old, new = cluster.place(second).ipv4, "192.168.50.77"
    file = second.manifests / "nodes.yaml"
    in_node(second, partial(moved, old, new))
    file.write_text(file.read_text().replace(old, new))
    eventually(lambda: new in json.dumps(asked(first, "/v1/cluster/nodes")), within=60)
    both_reach(cluster)
    assert old not in {str(value.tunnel_endpoint) for value in in_node(first, rows).values()}


def mtu(size: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="uplink")[0], mtu=size)


def sizes() -> tuple[int, int]:
    """MTU of a pod's link and of its default route."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (link,) = ip.link("get", index=ip.link_lookup(ifname="eth0")[0])
        (route,) = ip.get_default_routes(family=socket.AF_INET)
        return int(link.get_attr("IFLA_MTU")), int(route.get_attr("RTA_METRICS").get_attr("RTAX_MTU"))


def in_pod(lab: Lab, fn: Callable[[], Any]) -> Any:
    with lab.open_pod(lab.pods()[0]) as pod:
        return pod.run(fn)


def test_running_pods_follow_the_mtu_of_the_links(cluster: Cluster) -> None:
    """Smaller first: what is on its way then fits."""
    nodes = cluster.nodes()
    with traffic(cluster) as counted:
        for size in (1400, 1500, 1400):
            for lab in nodes:
                in_node(lab, partial(mtu, size))
            eventually(lambda: all(in_pod(lab, sizes) == (size, size - 50) for lab in nodes), within=30)  # noqa: B023  # at once
    assert min(counted.sent) > 500
    assert counted.lost == [0, 0]
    first, second = nodes
    with second.open_pod(second.pods()[0]) as there, inside(there):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("", 7777))
    sock.settimeout(0.5)
    with sock, first.open_pod(first.pods()[0]) as pod:
        pod.run(send_large, address(second))  # the pod cuts it: by the MTU of its route
        assert len(sock.recv(4096)) == 1400


def send_large(target: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(bytes(1400), (target, 7777))
