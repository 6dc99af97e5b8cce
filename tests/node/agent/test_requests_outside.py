"""HTTP rules for traffic from and to the outside: client addresses are preserved."""

from __future__ import annotations

import socket
import struct
import subprocess
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest

from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab
from tests.node.agent.node_ports import NODE, NODE_PORT, OUTSIDE, command, give_addresses, service, slices
from tests.support.requests import (
    PORT,
    PUBLIC,
    Answer,
    Shop,
    answering,
    ask_http,
    of_entities,
    policy,
    shop,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

DUAL = "--ipv6-range=fd00:5::/112"
SERVICES = (DUAL, "--enable-node-port=true")


def _states(where: Namespaces, address: str, path: str, status: int, port: int = PORT) -> bool:
    return where.run(partial(ask_http, address, path, port=port)).status == status


def _asked_from_outside(place: Shop, outside: Namespaces) -> None:
    """A policy about the world is in force at a node port, for both families."""
    backends = {4: place.server.ipv4, 6: place.server.ipv6}
    (place.folder / "near.yaml").write_text(service("near", NODE_PORT) + slices("near", backends))
    place.rule(of_entities(policy(PUBLIC), "world"))
    for version in (4, 6):
        at = partial(ask_http, NODE[version], port=NODE_PORT)
        eventually(partial(_states, outside, NODE[version], "/public/1", 200, NODE_PORT))
        assert outside.run(at, "/public/1") == (200, OUTSIDE[version]), "the server sees the client"
        assert outside.run(at, "/secret") == (403, "Access denied\r\n")
        for number in range(20):
            assert outside.run(at, f"/public/{number}").status == 200


def test_a_client_outside_asks_a_node_port(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with shop(node, tmp_path, *SERVICES) as place, node.open_outside() as outside:
        _asked_from_outside(place, outside)


def test_a_client_outside_asks_a_node_port_that_a_driver_serves(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with (
        shop(node, tmp_path, *SERVICES, "--bpf-lb-acceleration=generic") as place,
        node.open_outside() as outside,
    ):
        _asked_from_outside(place, outside)


def _seen(place: Shop, version: int) -> Answer:
    return place.here.run(ask_http, OUTSIDE[version], "/public/1")


def test_a_server_outside_sees_the_pod_that_asks(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    settings = (DUAL, "--enable-ipv4-masquerade=false", "--enable-ipv6-masquerade=false")
    with shop(node, tmp_path, *settings) as place, node.open_outside() as outside, answering(outside):
        outside.run(command, f"route add {place.client.ipv4} via {NODE[4]}")
        outside.run(command, f"route add {place.client.ipv6} via {NODE[6]}")
        place.rule(of_entities(policy(PUBLIC, direction="egress"), "world"))
        for version, own in ((4, place.client.ipv4), (6, place.client.ipv6)):
            eventually(partial(_states, place.here, OUTSIDE[version], "/secret", 403))
            eventually(partial(_states, place.here, OUTSIDE[version], "/public/1", 200))
            assert _seen(place, version) == (200, own)


def test_a_server_outside_sees_the_node_where_pods_are_masqueraded(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    settings = (DUAL, "--enable-ipv4-masquerade=true", "--enable-ipv6-masquerade=true")
    with shop(node, tmp_path, *settings) as place, node.open_outside() as outside, answering(outside):
        place.rule(of_entities(policy(PUBLIC, direction="egress"), "world"))
        for version in (4, 6):
            eventually(partial(_states, place.here, OUTSIDE[version], "/secret", 403))
            eventually(partial(_states, place.here, OUTSIDE[version], "/public/1", 200))
            for _ in range(20):
                assert _seen(place, version) == (200, NODE[version])


def test_the_node_itself_sees_the_pod_that_asks(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with shop(node, tmp_path, DUAL) as place, node.open() as host, answering(host):
        place.rule(of_entities(policy(PUBLIC, direction="egress"), "host"))
        for version, own in ((4, place.client.ipv4), (6, place.client.ipv6)):
            eventually(partial(_states, place.here, NODE[version], "/secret", 403))
            eventually(partial(_states, place.here, NODE[version], "/public/1", 200))
            assert place.here.run(ask_http, NODE[version], "/public/1") == (200, own)


def _error(version: int, pod: str, ends: tuple[int, int]) -> bytes:
    """'Packet too big' about a segment that the pod has sent from the first port to the second, outside."""
    transport = struct.pack("!HHIIBBHHH", *ends, 1, 1, 5 << 4, 0x10, 0, 0, 0)
    own, other = ip_address(pod).packed, ip_address(OUTSIDE[version]).packed
    if version == 4:
        quoted = struct.pack("!BBHHHBBH", 0x45, 0, 1500, 1, 0x4000, 64, 6, 0) + own + other + transport
        message = struct.pack("!BBHHH", 3, 4, 0, 0, 1280) + quoted
        words = struct.unpack(f"!{len(message) // 2}H", message)
        total = sum(words)
        total = (total & 0xFFFF) + (total >> 16)
        checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        return message[:2] + struct.pack("!H", checksum) + message[4:]
    quoted = struct.pack("!IHBB", 6 << 28, 1440, 6, 64) + own + other + transport
    return struct.pack("!BBHI", 2, 0, 0, 1280) + quoted  # the kernel fills in the checksum


def _send_error(version: int, pod: str, ends: tuple[int, int]) -> None:
    family, protocol = ((socket.AF_INET, 1), (socket.AF_INET6, 58))[version == 6]
    with socket.socket(family, socket.SOCK_RAW, protocol) as sending:
        sending.sendto(_error(version, pod, ends), (pod, 0))


def _heard() -> int:
    """Errors that found a connection here, though none of a segment under way."""
    names, values = (
        line.split()
        for line in Path("/proc/self/net/netstat").read_text().splitlines()
        if line.startswith("TcpExt:")
    )
    return int(values[names.index("OutOfWindowIcmps")])


def _more(host: Namespaces, than: int) -> bool:
    return host.run(_heard) > than


def _asking(version: int, pod: str) -> int:
    """The port in this namespace of a connection that was opened in the pod's name."""
    table = Path("/proc/self/net/tcp6" if version == 6 else "/proc/self/net/tcp").read_text()
    packed = ip_address(pod).packed
    own = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4)).hex().upper()
    rows = (line.split() for line in table.splitlines()[1:])
    return next(int(row[1].split(":")[1], 16) for row in rows if row[1].startswith(own) and row[3] == "01")


def _hold(address: str, to: int = PORT) -> tuple[socket.socket, int]:
    """A connection that stays open; its port here."""
    held = socket.create_connection((address, to), timeout=30)
    held.sendall(b"GET /public/1 HTTP/1.1\r\nHost: x\r\n\r\n")
    held.recv(100)
    return held, held.getsockname()[1]


@pytest.mark.parametrize("replaced", ["false", "true"], ids=["by-the-stack", "past-the-stack"])
def test_envoy_hears_that_its_packets_are_too_big(node: Lab, tmp_path: Path, replaced: str) -> None:
    """Whether it has asked in a pod's name, or answers in it; a client outside asks the pod itself."""
    give_addresses(node)
    own_addresses = (f"--enable-ipv{version}-masquerade=false" for version in (4, 6))
    settings = (DUAL, *own_addresses, f"--kube-proxy-replacement={replaced}")
    with (
        shop(node, tmp_path, *settings) as place,
        node.open() as host,
        node.open_outside() as outside,
        answering(outside),
    ):
        for one in (place.client, place.server):
            outside.run(command, f"route add {one.ipv4} via {NODE[4]}")
            outside.run(command, f"route add {one.ipv6} via {NODE[6]}")
        out = policy(PUBLIC, direction="egress", name="out")
        place.rule(of_entities(policy(PUBLIC), "world"), of_entities(out, "world"))
        for version in (4, 6):
            own = {4: (place.client.ipv4, place.server.ipv4), 6: (place.client.ipv6, place.server.ipv6)}
            client, server = own[version]
            eventually(partial(_states, place.here, OUTSIDE[version], "/secret", 403))
            eventually(partial(_states, outside, server, "/secret", 403))
            before: int = host.run(_heard)
            eventually(partial(_states, place.here, OUTSIDE[version], "/public/1", 200))
            asking = host.run(partial(_asking, version, client))
            outside.run(partial(_send_error, version, client, (asking, PORT)))
            eventually(partial(_more, host, before))
            with inside(outside):
                held, port = _hold(server)
            with held:
                before = host.run(_heard)
                outside.run(partial(_send_error, version, server, (PORT, port)))
                eventually(partial(_more, host, before))


def kube_proxy(target: str, masquerade: bool) -> str:
    """The rules that kube-proxy has for a node port with one backend, by its externalTrafficPolicy."""
    mark = "-A KUBE-EXT-SHOP -j KUBE-MARK-MASQ\n" if masquerade else ""
    return f"""*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-EXT-SHOP - [0:0]
:KUBE-SVC-SHOP - [0:0]
:KUBE-SEP-SHOP - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m tcp --dport {NODE_PORT} -j KUBE-EXT-SHOP
{mark}-A KUBE-EXT-SHOP -j KUBE-SVC-SHOP
-A KUBE-SVC-SHOP -j KUBE-SEP-SHOP
-A KUBE-SEP-SHOP -p tcp -m tcp -j DNAT --to-destination {target}
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
"""


def load(version: int, text: str) -> None:
    """Take them into the kernel. Raises CalledProcessError."""
    name = {4: "iptables", 6: "ip6tables"}[version]
    subprocess.run([f"{name}-nft-restore", "--noflush"], input=text, text=True, check=True)


def own_table() -> str:
    """The agent's rules of nftables."""
    listed = subprocess.run(
        ["nft", "list", "table", "inet", "hive-proxy"], check=False, text=True, capture_output=True
    )
    return listed.stdout


def take_away() -> None:
    """As an administrator who flushes the node's rules."""
    subprocess.run(["nft", "flush", "table", "inet", "hive-proxy"], check=True)


def flush(version: int) -> None:
    """No rules any more."""
    name = {4: "iptables", 6: "ip6tables"}[version]
    for what in ("-F", "-X"):
        subprocess.run([f"{name}-nft", "-t", "nat", what], check=True)


def _asked_by_kube_proxy(place: Shop, node: Namespaces, outside: Namespaces, masquerade: bool) -> None:
    for version, pod in ((4, f"{place.server.ipv4}:{PORT}"), (6, f"[{place.server.ipv6}]:{PORT}")):
        node.run(load, version, kube_proxy(pod, masquerade))
        at = partial(ask_http, NODE[version], port=NODE_PORT)
        eventually(partial(_states, outside, NODE[version], "/public/1", 200, NODE_PORT))
        assert outside.run(at, "/secret") == (403, "Access denied\r\n")
        answer = outside.run(at, "/public/1")
        assert answer.status == 200
        assert masquerade or answer.body == OUTSIDE[version], "the server sees the client"
        for number in range(20):
            assert outside.run(at, f"/public/{number}").status == 200
        eventually(partial(_states, node, NODE[version], "/public/1", 200, NODE_PORT))
        assert node.run(at, "/secret").status == 403, "the node itself is a client"
        with inside(outside):
            held, port = _hold(NODE[version], NODE_PORT)
        with held:
            before = node.run(_heard)
            outside.run(partial(_send_error, version, NODE[version], (NODE_PORT, port)))
            eventually(partial(_more, node, before))
        node.run(flush, version)


@pytest.mark.parametrize(
    ("masquerade", "settings"),
    [(False, ()), (True, ()), (False, ("--enable-endpoint-routes=true",))],
    ids=["own-address", "masqueraded", "endpoint-routes"],
)
def test_a_client_outside_asks_a_node_port_of_kube_proxy(
    node: Lab, tmp_path: Path, masquerade: bool, settings: tuple[str, ...]
) -> None:
    give_addresses(node)
    with (
        shop(node, tmp_path, DUAL, "--allow-localhost=policy", *settings) as place,
        node.open() as host,
        node.open_outside() as outside,
    ):
        place.rule(of_entities(policy(PUBLIC), "world", "host"))
        _asked_by_kube_proxy(place, host, outside, masquerade)


def test_rules_that_others_remove_come_back_and_go_with_the_last_redirect(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path, DUAL) as place, node.open() as host:
        eventually(lambda: "dport" in host.run(own_table))
        before = host.run(own_table)
        host.run(take_away)
        eventually(lambda: host.run(own_table) == before)
        place.rule(policy(PUBLIC, direction="egress"))
        eventually(lambda: host.run(own_table) == "")


def _answers(address: str, port: int, family: socket.AddressFamily) -> bool:
    """Whether anything takes a connection there."""
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(0.5)
        try:
            made.connect((address, port))
        except OSError:
            return False
        return True


def test_listeners_of_envoy_are_reached_by_redirects_alone(node: Lab, tmp_path: Path) -> None:
    """Else a client could have a rule of another pod let it through, or Envoy ask in its name."""
    give_addresses(node)
    with shop(node, tmp_path, DUAL) as place, node.open() as host, node.open_outside() as outside:
        place.rule(policy(PUBLIC))
        eventually(partial(_states, place.here, place.server.ipv4, "/public/1", 200))
        (port,) = place.ports.values()
        assert host.run(_answers, "127.0.0.1", port, socket.AF_INET), "it does listen"
        for where in (place.here, outside, host):
            for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
                assert not where.run(_answers, NODE[version], port, family), (where, version)
        for where in (place.here, outside):
            assert not where.run(_answers, place.server.ipv4, port, socket.AF_INET)
        outside.run(command, f"route add 127.0.0.9/32 via {NODE[4]}")
        outside.run(command, "route del table local local 127.0.0.0/8 dev lo")
        assert not outside.run(_answers, "127.0.0.9", port, socket.AF_INET)
