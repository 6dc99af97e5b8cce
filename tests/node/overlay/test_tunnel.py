"""Two lab nodes joined by VXLAN: identities are preserved, and no other host can act as a node."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN

from cells.maps.map import open_map
from cells.maps.records.cluster import (
    TUNNEL_OVER_IPV6,
    TUNNEL_OWN_IDENTITIES,
    NodeKey,
    NodeValue,
    TunnelConfig,
    TunnelKey,
    TunnelValue,
)
from cells.maps.records.flows import MetricsKey, MetricsValue
from cells.proxy.envoy import end_envoy
from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.cluster.network import Place
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import ROOT, Lab, exclusive
from hive.lab.traffic.flows import Received, Sent, tcp_listener, udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import interfaces, ping
from tests.support.agents import run_agent
from tests.support.fqdn_scenario import connects
from tests.support.namespaces import need_root
from tests.support.requests import PUBLIC, answering, ask_http, policy
from tests.support.two_nodes import hive, reaches
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"tunnel-{os.getpid()}"
SETTINGS = (TUNNEL, "--enable-ipv6=true")
PORT, SECRET = 8472, 7777
GLOBALS = Path("/sys/fs/bpf/tc/globals")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a pod each, both families on, a tunnel between them."""
    need_root()
    found = Cluster(NAME)
    try:
        up = ("lab", "up", "--name", f"{NAME}-1", "--nodes", "2", "--pods", "1", "--tunnel")
        hive(*up, "--enable-ipv6=true")
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())
    assert not list(ROOT.glob(f"{NAME}*"))


def restarted(cluster: Cluster, lab: Lab, *settings: str) -> None:
    """Kill the agent of the node, and start another."""
    agent_process.crash(lab)
    pid = agent_process.start(lab, *cluster.settings(settings))
    agent_process.wait_ready(lab, pid)


def addresses(pod: str) -> list[str]:
    (found,) = json.loads(hive("lab", "get", "--name", NAME, "pod", pod, "-o", "json"))
    return [one["ip"] for one in found["status"]["podIPs"]]


def ipv4(pod: str) -> str:
    return next(ip for ip in addresses(pod) if "." in ip)


def in_node(lab: Lab, ask: Callable[[], object]) -> object:
    with lab.open() as node:
        return node.run(ask)


def dropped() -> dict[int, int]:
    """Packets of this node by reason."""
    with open_map(GLOBALS / "cilium_metrics") as table:
        found: dict[int, int] = {}
        for key, value in table.items():
            reason = MetricsKey.unpack(key).reason
            found[reason] = found.get(reason, 0) + MetricsValue.unpack(value).packets
        return found


def drops(lab: Lab, reason: int) -> int:
    found = in_node(lab, dropped)
    assert isinstance(found, dict)
    return int(found.get(reason, 0))


def through_the_tunnel() -> int:
    """Packets that have come out of it here."""
    return int(Path("/sys/class/net/cilium_vxlan/statistics/rx_packets").read_text(encoding="ascii"))


def facts() -> TunnelConfig:
    with open_map(GLOBALS / "hive_tunnel") as table:
        return TunnelConfig.unpack(table.lookup(bytes(4)) or b"")


def outside() -> tuple[int, str, int]:
    """MTU inside, source outside, and flags."""
    known = facts()
    return known.mtu, str(known.source), known.flags


def endpoints() -> dict[str, str]:
    if not (GLOBALS / "cilium_tunnel_map").exists():  # on a node without a tunnel
        return {}
    with open_map(GLOBALS / "cilium_tunnel_map") as table:
        rows = {TunnelKey.unpack(key): TunnelValue.unpack(value) for key, value in table.items()}
    return {str(key.network): str(value.node) for key, value in rows.items()}


def node_ids() -> dict[str, int]:
    with open_map(GLOBALS / "cilium_node_map_v2") as table:
        return {str(NodeKey.unpack(key).ip): NodeValue.unpack(value).id for key, value in table.items()}


def all_reach(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab, pod, other in ((first, "pod-1-1", "pod-2-1"), (second, "pod-2-1", "pod-1-1")):
        for address in addresses(other):
            eventually(partial(reaches, lab, pod, address))


def test_pods_of_two_nodes_reach_each_other_through_the_tunnel(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    before = in_node(second, through_the_tunnel)
    all_reach(cluster)
    after = in_node(second, through_the_tunnel)
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before >= 4
    for address in addresses("pod-2-1"):
        with first.open() as node:
            eventually(partial(node.run, ping, address, 1))


def test_pods_do_not_get_the_port_of_the_tunnel_for_connections(cluster: Cluster) -> None:
    reserved = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
    with cluster.nodes()[0].open_pod("pod-1-1") as pod, inside(pod):
        assert reserved.read_text() == f"{PORT}\n"


def test_tools_see_where_packets_go(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    place = cluster.place(second)
    ranges = {cidr.partition("/")[0] for cidr in place.pod_cidrs}
    eventually(partial(reports, first, endpoints, dict.fromkeys(ranges, place.ipv4)))
    eventually(partial(reports, first, node_ids, dict.fromkeys((place.ipv4, place.ipv6), 1)))
    config = in_node(first, facts)
    assert isinstance(config, TunnelConfig)
    assert (config.mtu, config.port, str(config.source)) == (1450, PORT, cluster.place(first).ipv4)
    assert config.flags == TUNNEL_OWN_IDENTITIES  # there is no API server to agree upon numbers by


def test_no_packet_is_lost_while_an_agent_is_killed_and_comes_back(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    with first.open_pod("pod-1-1") as one, second.open_pod("pod-2-1") as two:
        with inside(two):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = two.start(udp_receiver, sock)
            sender: Child[Sent] = one.start(udp_sender, (ipv4("pod-2-1"), sock.getsockname()[1]), 500.0)
            for lab in (first, second):
                restarted(cluster, lab, *SETTINGS)
            sent = sender.finish(within=60)
            received = receiver.finish(within=60)
    assert sent.packets > 200
    assert received.packets == sent.packets


def forged(target: str, payload: bytes) -> bytes:
    """A VXLAN packet that claims to be from the host of another node, to a pod."""
    inner = IP(src="10.244.1.77", dst=target) / UDP(sport=1, dport=SECRET) / payload
    return bytes(VXLAN(vni=6, flags="Instance") / Ether(dst="02:00:00:00:00:01") / inner)


def send(packet: bytes, target: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(packet, (target, PORT))


def listening(pod: Namespaces) -> socket.socket:
    with inside(pod):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("", SECRET))
    sock.settimeout(30)
    return sock


def test_a_forged_tunnel_packet_is_not_delivered(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    target, place = ipv4("pod-2-1"), cluster.place(second)
    unknown, prohibited = drops(second, 172), drops(first, 170)
    with second.open_pod("pod-2-1") as two, listening(two) as sock:
        with cluster.network.open() as outside:  # a neighbour of the nodes, which is none
            outside.run(send, forged(target, b"from outside"), place.ipv4)
        eventually(lambda: drops(second, 172) == unknown + 1)
        with first.open_pod("pod-1-1") as one:
            for address in (place.ipv4, cluster.place(first).ipv4):
                one.run(send, forged(target, b"from a pod"), address)
        eventually(lambda: drops(first, 170) == prohibited + 2)
        with first.open() as node:  # the node's own packets are believed: so the others could have arrived
            node.run(send, forged(target, b"from a node"), place.ipv4)
        assert sock.recv(64) == b"from a node"


def vanished() -> None:
    """What an administrator removes: the device, and the route to the other node."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname="cilium_vxlan")
        ip.link("del", index=index)
        (host,) = ip.link_lookup(ifname="cilium_host")
        for route in ip.get_routes(family=socket.AF_INET, oif=host, proto=2):
            if route["dst_len"] == 24:
                ip.route("del", dst=f"{route.get_attr('RTA_DST')}/24", oif=host, proto=2)


def test_removed_devices_and_routes_are_restored(cluster: Cluster) -> None:
    first, _ = cluster.nodes()
    in_node(first, vanished)
    all_reach(cluster)
    with first.open() as node:
        eventually(partial(node.run, ping, ipv4("pod-2-1"), 1))


def device(protocol: str = "vxlan") -> tuple[int, int] | None:
    """Port and MTU of the tunnel; None without one."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        indexes = ip.link_lookup(ifname=f"cilium_{protocol}")
        if not indexes:
            return None
        (link,) = ip.get_links(indexes[0])
        data = link.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_DATA")
        return data.get_attr(f"IFLA_{protocol.upper()}_PORT"), link.get_attr("IFLA_MTU")


def reports(lab: Lab, ask: Callable[[], object], expected: object) -> bool:
    return in_node(lab, ask) == expected


def set_uplink(mtu: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="uplink")[0], mtu=mtu)


def pod_mtus() -> tuple[int, set[int]]:
    """MTU of a pod's link, and of its default routes."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (link,) = ip.link("get", index=ip.link_lookup(ifname="eth0")[0])
        routes = [route for family in (2, 10) for route in ip.get_default_routes(family=family)]
        return link.get_attr("IFLA_MTU"), {each.get_nested("RTA_METRICS", "RTAX_MTU") for each in routes}


def test_running_pods_follow_the_mtu_of_the_device(cluster: Cluster) -> None:
    first, _ = cluster.nodes()
    try:
        for mtu in (1400, 1500):
            in_node(first, partial(set_uplink, mtu))
            with first.open_pod("pod-1-1") as pod:
                eventually(lambda: pod.run(pod_mtus) == (mtu, {mtu - 50}))  # noqa: B023  # at once
            known = in_node(first, facts)
            assert isinstance(known, TunnelConfig)
            assert known.mtu == mtu - 50
    finally:
        in_node(first, partial(set_uplink, 1500))
    all_reach(cluster)


def only_ipv6(node: dict[str, Any]) -> dict[str, Any]:
    """A Node or CiliumNode of the lab without its IPv4 address."""
    part = "spec" if node["kind"] == "CiliumNode" else "status"
    left = [one for one in node[part]["addresses"] if ":" in one.get("ip", one.get("address"))]
    return {**node, part: {**node[part], "addresses": left}}


def uplink_ipv4(place: Place | None) -> None:
    """Give the node's device its address of IPv4 and the way out back, or take them."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (uplink,) = ip.link_lookup(ifname="uplink")
        ip.flush_addr(index=uplink, family=socket.AF_INET)
        if place:
            ip.addr("add", index=uplink, address=place.ipv4, prefixlen=24)
            ip.route("add", dst="default", gateway=place.routers[0])


def send_whole(target: str, port: int, length: int) -> None:
    """A datagram in a packet of this length, which may not be fragmented (ip(7), ipv6(7))."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    level, option, headers = (41, 23, 48) if ":" in target else (socket.IPPROTO_IP, 10, 28)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(level, option, 2)
        sock.sendto(bytes(length - headers), (target, port))


def test_nodes_without_ipv4_reach_each_other_over_ipv6(cluster: Cluster) -> None:
    """They change to it one by one, and no packet is lost; then there is no IPv4 between them."""
    first, second = cluster.nodes()
    with first.open_pod("pod-1-1") as one, second.open_pod("pod-2-1") as two:
        with inside(two):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = two.start(udp_receiver, sock)
            sender: Child[Sent] = one.start(udp_sender, (ipv4("pod-2-1"), sock.getsockname()[1]), 500.0)
            for lab in (first, second):
                restarted(cluster, lab, *SETTINGS, "--underlay-protocol=ipv6")
            sent = sender.finish(within=60)
            received = receiver.finish(within=60)
    assert received.packets == sent.packets > 200
    nodes = [each for each, file in cluster.manifests.objects() if file == "nodes.yaml"]
    try:
        cluster.manifests.write("nodes", map(only_ipv6, nodes))
        for lab, other in ((first, second), (second, first)):
            in_node(lab, partial(uplink_ipv4, None))
            ranges = (cidr.partition("/")[0] for cidr in cluster.place(other).pod_cidrs)
            eventually(partial(reports, lab, endpoints, dict.fromkeys(ranges, cluster.place(other).ipv6)))
            eventually(partial(reports, lab, node_ids, {cluster.place(other).ipv6: 1}))
        all_reach(cluster)
        over_ipv6 = (1430, cluster.place(first).ipv6, TUNNEL_OWN_IDENTITIES | TUNNEL_OVER_IPV6)
        eventually(partial(reports, first, outside, over_ipv6))
        with first.open_pod("pod-1-1") as one, second.open_pod("pod-2-1") as two:
            for address in addresses("pod-2-1"):  # in a packet of 1500 bytes
                with inside(two):
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    sock = socket.socket(family, socket.SOCK_DGRAM)
                    sock.bind((address, 0))
                with sock:
                    sock.settimeout(30)
                    one.run(send_whole, address, sock.getsockname()[1], 1430)
                    assert len(sock.recv(2000)) == 1430 - (48 if ":" in address else 28)
    finally:
        for lab in (first, second):
            in_node(lab, partial(uplink_ipv4, cluster.place(lab)))
        cluster.manifests.write("nodes", nodes)


def test_the_next_start_follows_port_and_mode(cluster: Cluster) -> None:
    """Native, by routes, and back on another port: the tunnel goes and comes, pods talk on."""
    for lab in cluster.nodes():
        restarted(cluster, lab, "--enable-ipv6=true")
    for lab in cluster.nodes():
        for ask, left in ((device, None), (endpoints, {}), (facts, TunnelConfig())):
            eventually(partial(reports, lab, ask, left))
    all_reach(cluster)
    for lab in cluster.nodes():
        restarted(cluster, lab, *SETTINGS, "--tunnel-port=8999", "--mtu=1400")
    for lab in cluster.nodes():
        eventually(partial(reports, lab, device, (8999, 1400)))
    all_reach(cluster)


def has_geneve() -> bool:
    """Whether this kernel makes such devices."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as ip:
        try:
            ip.link("add", ifname="probe", kind="geneve", geneve_collect_metadata=True, geneve_port=7777)
        except NetlinkError as error:
            if error.code != errno.EOPNOTSUPP:
                raise
            return False
        ip.link("del", index=ip.link_lookup(ifname="probe")[0])
        return True


def test_geneve_is_the_tunnel_or_refused_where_the_kernel_has_none(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    chosen = (*SETTINGS, "--tunnel-protocol=geneve")
    if in_node(first, has_geneve):
        for lab in (first, second):
            restarted(cluster, lab, *chosen)
        all_reach(cluster)
        for lab in (first, second):
            eventually(partial(reports, lab, partial(device, "geneve"), (6081, 1500)))
            assert reports(lab, device, None)
    else:
        before = in_node(first, device)
        agent_process.crash(first)
        ended = run_agent(first, f"--manifests-dir={first.manifests}", *cluster.settings(chosen))
        line = (
            "tunnel-protocol=geneve: this kernel has no such devices (CONFIG_GENEVE): load its module geneve,"
            " or set tunnel-protocol=vxlan on all nodes"
        )
        assert ended.code == 1
        assert line in ended.stderr.splitlines()[-1]
        assert reports(first, device, before)
        all_reach(cluster)  # by what the agent before has left
    for lab in (first, second):
        restarted(cluster, lab, *SETTINGS)
        eventually(partial(reports, lab, device, (PORT, 1500)))
        assert reports(lab, partial(device, "geneve"), None)
    all_reach(cluster)


def states(here: Namespaces, address: str, status: int) -> bool:
    return here.run(ask_http, address, "/secret").status == status


PAST_THE_STACK = ("--enable-ipv6=true", "--kube-proxy-replacement=true")


@pytest.mark.parametrize("settings", [SETTINGS, PAST_THE_STACK], ids=["tunnel", "native"])
def test_requests_that_come_from_another_node_are_read(cluster: Cluster, settings: tuple[str, ...]) -> None:
    first, second = cluster.nodes()
    for lab in (first, second):
        restarted(cluster, lab, *settings)
    all_reach(cluster)
    everybody = policy(PUBLIC)
    ports = everybody["spec"]["ingress"][0]["toPorts"]
    everybody["spec"] |= {"endpointSelector": {}, "ingress": [{"fromEntities": ["all"], "toPorts": ports}]}
    try:
        with second.open_pod("pod-2-1") as there, first.open_pod("pod-1-1") as here, answering(there):
            for address in addresses("pod-2-1"):
                eventually(partial(states, here, address, 200))
            cluster.manifests.write("requests", [everybody])
            for own, address in zip(addresses("pod-1-1"), addresses("pod-2-1"), strict=True):
                eventually(partial(states, here, address, 403))
                assert here.run(ask_http, address, "/public/1") == (200, own)
    finally:
        cluster.manifests.remove("requests")
        for lab in (first, second):
            agent_process.crash(lab)
            in_node(lab, partial(end_envoy, Path("/var/run/cilium")))
            agent_process.wait_ready(lab, agent_process.start(lab, *cluster.settings(SETTINGS)))


def test_pods_with_routes_of_their_own_are_reached_through_it_too(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    try:
        for lab in (first, second):
            restarted(cluster, lab, *SETTINGS, "--enable-endpoint-routes=true")
        all_reach(cluster)
        for address in addresses("pod-2-1"):
            with first.open() as node:
                eventually(partial(node.run, ping, address, 1))
            with second.open() as node:
                eventually(partial(node.run, ping, address, 1))
        restarted(cluster, first, *SETTINGS)  # one node has them, the other has not
        all_reach(cluster)
    finally:
        for lab in (first, second):
            restarted(cluster, lab, *SETTINGS)
    all_reach(cluster)


def guarded(port: int) -> dict[str, object]:
    """Nodes may be reached by this port alone, and by each other's tunnels."""
    ports = [{"port": str(port), "protocol": "TCP"}, {"port": str(PORT), "protocol": "UDP"}]
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumClusterwideNetworkPolicy",
        "metadata": {"name": "guarded"},
        "spec": {"nodeSelector": {}, "ingress": [{"fromEntities": ["all"], "toPorts": [{"ports": ports}]}]},
    }


def guarded_from_pods(port: int) -> dict[str, object]:
    """Nodes may be reached by pods by this port alone, and by each other's tunnels."""
    tunnel, pods = {"port": str(PORT), "protocol": "UDP"}, {"port": str(port), "protocol": "TCP"}
    rules = [
        {"fromEntities": ["remote-node"], "toPorts": [{"ports": [tunnel]}]},
        {"fromEndpoints": [{}], "toPorts": [{"ports": [pods]}]},
    ]
    return {**guarded(port), "spec": {"nodeSelector": {}, "ingress": rules}}


def test_policies_of_nodes_select_pods_of_other_nodes_by_their_labels(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab in (first, second):
        restarted(cluster, lab, *SETTINGS, "--enable-host-firewall=true")
    all_reach(cluster)
    with second.open() as there, first.open_pod("pod-1-1") as here, first.open() as node:
        with inside(there):
            listeners = [tcp_listener(), tcp_listener()]
        open_port, closed_port = (each.getsockname()[1] for each in listeners)
        address = cluster.place(second).ipv4
        try:
            eventually(lambda: here.run(connects, address, closed_port))
            cluster.manifests.write("guarded", [guarded_from_pods(open_port)])
            eventually(lambda: not here.run(connects, address, closed_port))
            assert here.run(connects, address, open_port)
            assert not node.run(connects, address, open_port)
        finally:
            cluster.manifests.remove("guarded")
            for each in listeners:
                each.close()
            for lab in (first, second):
                restarted(cluster, lab, *SETTINGS)


def test_policies_of_nodes_hold_for_what_comes_out_of_the_tunnel(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    restarted(cluster, second, *SETTINGS, "--enable-host-firewall=true")
    all_reach(cluster)
    with second.open() as there, first.open_pod("pod-1-1") as here:
        with inside(there):
            listeners = [tcp_listener(), tcp_listener()]
        open_port, closed_port = (each.getsockname()[1] for each in listeners)
        (host,) = (one for one in there.run(interfaces) if one.name == "cilium_host")
        router = next(text.partition("/")[0] for text in host.addresses if "." in text)

        def reached(port: int) -> tuple[bool, bool]:
            """By its address in the tunnel, and by that of its device."""
            return here.run(connects, router, port), here.run(connects, cluster.place(second).ipv4, port)

        try:
            before = there.run(through_the_tunnel)
            eventually(lambda: reached(closed_port) == (True, True))
            assert there.run(through_the_tunnel) > before, "that is the way"
            cluster.manifests.write("guarded", [guarded(open_port)])
            eventually(lambda: reached(closed_port) == (False, False))
            assert reached(open_port) == (True, True)
            all_reach(cluster)
        finally:
            cluster.manifests.remove("guarded")
            for each in listeners:
                each.close()
            restarted(cluster, second, *SETTINGS)
