"""Packets to other nodes' pods leave native devices by WireGuard; in strict mode none in clear text."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, ip_network

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, ICMPv6ND_NS, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.flows import (
    ENCRYPTION_NODES,
    ENCRYPTION_STRICT,
    ENCRYPTION_STRICT_NODES,
    EncryptionConfig,
)
from tests.kernel.datapath.world import EGRESS, IFINDEX, NODE, NODE6, OK, OUTSIDE, ROUTER, A, World
from tests.kernel.datapath_nat.conftest import device

pytestmark = pytest.mark.kernel

REDIRECT, UNENCRYPTED, INVALID = 7, 195, 134
WG, SECOND, PORT = 77, 78, 51871
CLUSTER = IPv4Network("10.0.0.0/8")
POD, POD6, UNKNOWN = "10.2.0.5", "fd00:10:2::5", "10.2.0.9"
PEER, PEER6 = "192.168.7.8", "fd00:7::8"
REMOTE_NODE = 6
MARK, OVERLAY, PROXY = 0x1E00, 0x0400, 0x0B00


def packet(source: str, destination: str, sport: int = 40000, dport: int = 53) -> Packet:
    head = IPv6(src=source, dst=destination) if ":" in source else IP(src=source, dst=destination)
    return (
        Ether(src="0a:00:00:00:00:09", dst="0a:00:00:00:00:08") / head / UDP(sport=sport, dport=dport) / b"x"
    )


def know(world: World, network: str, identity: int, key: int) -> None:
    row = IpcacheValue(identity, IPv4Address(PEER), key)
    world.maps["cilium_ipcache"].update(IpcacheKey.of(ip_network(network)).pack(), row.pack())


def encrypt(world: World, flags: int = 0, rotating: tuple[int, int] = (0, 0)) -> None:
    """As the agent has it; ``flags`` ENCRYPTION_*, ``rotating`` the devices of a rotation."""
    strict = CLUSTER if flags & ENCRYPTION_STRICT else None
    facts = EncryptionConfig(WG, flags, strict, IPv4Address(NODE), PORT, rotating)
    world.maps["hive_encryption"].update(bytes(4), facts.pack())
    key = 255 * bool(flags & ENCRYPTION_NODES)
    for network, identity, number in (
        ("10.2.0.0/24", 2, 255),
        (f"{POD}/32", 5000, 255),
        (f"{POD6}/128", 5000, 255),
        (f"{PEER}/32", REMOTE_NODE, key),
        (f"{PEER6}/128", REMOTE_NODE, key),
    ):
        know(world, network, identity, number)


def sent(world: World, given: Packet, mark: int = 0) -> int | tuple[int, int] | None:
    outcome = world._run("hive_to_device", given, 1, mark)  # with a mark
    return outcome.dropped or outcome.action


@pytest.fixture(autouse=True)
def encrypting(world: World) -> Iterator[None]:
    """Pods' packets are encrypted; afterwards nothing is."""
    encrypt(world)
    yield
    world.maps["hive_encryption"].update(bytes(4), EncryptionConfig().pack())


def test_packets_to_pods_of_other_nodes_are_encrypted(world: World) -> None:
    for source, destination in ((A.ip, POD), (A.ip, UNKNOWN), (A.ip6, POD6)):
        assert sent(world, packet(source, destination)) == REDIRECT
    assert sent(world, packet(NODE, POD), PROXY) == REDIRECT, "a proxy sends, in the node's name"
    assert sent(world, packet(PEER, PEER), OVERLAY) == REDIRECT, "the tunnel's packets"
    for source, destination in ((A.ip, OUTSIDE), (A.ip, PEER), (NODE, POD), (OUTSIDE, POD), (PEER, POD)):
        assert sent(world, packet(source, destination)) == OK
    assert sent(world, packet(A.ip, POD), MARK) == OK, "it is encrypted"


def test_with_encrypt_node_packets_to_nodes_are_encrypted(world: World) -> None:
    encrypt(world, ENCRYPTION_NODES)
    for source, destination in ((A.ip, PEER), (NODE, PEER), (NODE, POD), (NODE6, PEER6), (NODE6, POD6)):
        assert sent(world, packet(source, destination)) == REDIRECT
    looks = Ether(src="0a:00:00:00:00:09", dst="0a:00:00:00:00:08") / IPv6(src=NODE6, dst=PEER6)
    assert sent(world, looks / ICMPv6ND_NS(tgt=PEER6)) == OK, "nodes find each other's link by it"
    assert sent(world, looks / ICMPv6EchoRequest()) == REDIRECT


def test_strict_mode_lets_no_clear_text_pass_between_pods(world: World) -> None:
    stranger = "10.3.0.1"
    assert sent(world, packet(A.ip, stranger)) == OK
    encrypt(world, ENCRYPTION_STRICT)
    assert sent(world, packet(A.ip, stranger)) == (UNENCRYPTED, EGRESS)
    assert sent(world, packet(A.ip, POD)) == REDIRECT
    assert sent(world, packet(A.ip, OUTSIDE)) == OK
    assert sent(world, packet(ROUTER, stranger)) == OK, "the node's own"
    know(world, f"{stranger}/32", REMOTE_NODE, 0)
    assert sent(world, packet(A.ip, stranger)) == (UNENCRYPTED, EGRESS)
    encrypt(world, ENCRYPTION_STRICT | ENCRYPTION_STRICT_NODES)
    assert sent(world, packet(A.ip, stranger)) == OK
    broken = packet(A.ip, POD)
    broken[IP].len = 2000
    assert sent(world, broken) == (INVALID, EGRESS), "what cannot be read might be anything"


def test_packets_are_encrypted_by_each_device_while_a_key_is_rotated(world: World) -> None:
    paths = world.maps["hive_encryption_paths"]
    for network in (f"{PEER}/32", "fd00:10:2::/64"):
        paths.update(IpcacheKey.of(ip_network(network)).pack(), struct.pack("<I", SECOND))
    encrypt(world, ENCRYPTION_STRICT, (SECOND, 0))
    for source, destination in ((A.ip, POD), (A.ip6, POD6), (A.ip, UNKNOWN)):
        assert sent(world, packet(source, destination)) == REDIRECT
    assert sent(world, packet(PEER, PEER), OVERLAY) == REDIRECT
    assert sent(world, packet(A.ip, "10.3.0.1")) == (UNENCRYPTED, EGRESS)
    encrypt(world, ENCRYPTION_STRICT, (SECOND, IFINDEX))
    assert sent(world, packet(A.ip, POD)) == OK, "it leaves by a device that encrypts"
    paths.clear()


def test_a_pod_gets_no_datagrams_of_wireguard(world: World) -> None:
    """Though it was given the port: it would cut nodes off from each other."""
    world.maps["hive_devices"].update(struct.pack("<I", IFINDEX), device().pack())
    left = world.device_sends(packet(A.ip, OUTSIDE, PORT, PORT))
    assert left.packet[IP].src == NODE
    port = left.packet[UDP].sport
    answer = world.device_gets(packet(OUTSIDE, NODE, PORT, port))
    assert answer.packet[IP].dst == (NODE if port == PORT else A.ip)
    world.device_sends(packet(A.ip, OUTSIDE, PORT + 2, PORT + 1))
    returned = packet(OUTSIDE, NODE, PORT + 1, PORT + 2)
    assert world.device_gets(returned).packet[IP].dst == A.ip
    encrypt(world, rotating=(SECOND, 0))
    assert world.device_gets(returned).packet[IP].dst == NODE
