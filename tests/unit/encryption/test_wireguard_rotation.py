"""Key rotation: the device to which two nodes change, their messages, and the peers of a second device."""

from __future__ import annotations

import base64
from ipaddress import ip_address, ip_network

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6

from cells.base.addresses import Family, IPNetwork
from cells.encryption.wireguard.device import Slot
from cells.encryption.wireguard.messages import MessageKind, RotationMessage, rotation_token
from cells.encryption.wireguard.peers import DUMMY_KEY, PeerCall
from cells.encryption.wireguard.rotation import (
    Handover,
    RotatingNode,
    SecondPeer,
    SecondPeers,
    handover,
)


def key(number: int) -> str:
    return base64.b64encode(bytes([9, *bytes(30), number])).decode()


def ready(name: str) -> RotatingNode:
    return RotatingNode(name, key(1), "ready")


def test_nodes_change_to_a_second_device_and_back() -> None:
    own = RotatingNode("default/b", key(2), key(3))
    assert handover(own, ready("default/a")) == Handover(Slot.NEXT, key(3), own=True)
    assert handover(ready("default/a"), own) == Handover(Slot.HELP, key(3), own=False)
    own = RotatingNode("default/b", key(3), key(3))
    assert handover(own, ready("default/a")) == Handover(Slot.MAIN, key(3), own=True)
    assert handover(ready("default/a"), own) == Handover(Slot.MAIN, key(3), own=False)
    assert handover(ready("default/a"), ready("default/b")) is None


def test_a_node_of_cilium_takes_no_part() -> None:
    assert handover(RotatingNode("default/b", key(2), key(3)), RotatingNode("default/a", key(1), "")) is None


def test_of_two_nodes_that_rotate_their_keys_the_first_by_name_goes_first() -> None:
    first, second = (RotatingNode(name, key(1), key(number)) for name, number in (("c/a", 4), ("c/b", 5)))
    assert handover(first, second) == Handover(Slot.NEXT, key(4), own=True)
    assert handover(second, first) == Handover(Slot.HELP, key(4), own=False)


@pytest.mark.parametrize(("source", "destination"), [("192.0.2.1", "192.0.2.2"), ("fd00::1", "fd00::2")])
def test_messages_are_udp_datagrams_that_are_read_back(source: str, destination: str) -> None:
    message = RotationMessage(
        ip_address(source), ip_address(destination), MessageKind.ASK, rotation_token(key(7))
    )
    packed = message.pack()
    assert RotationMessage.unpack(packed) == message
    layer = IPv6 if ":" in source else IP
    rebuilt = layer(packed)
    del rebuilt[UDP].chksum
    if layer is IP:
        del rebuilt.chksum
    assert bytes(rebuilt) == packed, "its checksums are right"
    for other in (packed[:-1], packed + b"x", packed.replace(b"hive", b"else"), b"", b"\x45"):
        assert RotationMessage.unpack(other) is None


class FakeLink:
    """A second device that records its peers and the calls."""

    def __init__(self) -> None:
        self.table: dict[bytes, set[IPNetwork]] = {}
        self.calls: list[PeerCall] = []

    def configure(self, call: PeerCall) -> None:
        self.calls.append(call)
        if call.remove:
            self.table.pop(call.key, None)
            return
        for other in self.table.values():
            other.difference_update(call.allowed)
        self.table.setdefault(call.key, set()).update(call.allowed)

    def peers(self) -> dict[bytes, frozenset[IPNetwork]]:
        return {one: frozenset(allowed) for one, allowed in self.table.items() if one != DUMMY_KEY}


def second_peer(number: int, *networks: str) -> SecondPeer:
    allowed = frozenset(map(ip_network, networks))
    return SecondPeer(base64.b64decode(key(number)), ip_address(f"192.0.2.{number}"), allowed, Slot.HELP.port)


def test_peers_of_a_second_device_are_those_asked_for() -> None:
    link = FakeLink()
    peers = SecondPeers()
    one, two = second_peer(1, "10.0.1.0/24", "10.0.9.1/32"), second_peer(2, "10.0.2.0/24")
    peers.sync(link, [one, two], made=True)
    assert link.peers() == {each.key: each.allowed for each in (one, two)}
    assert {call.port for call in link.calls} == {51873}
    link.calls.clear()
    peers.sync(link, [one, two], made=False)
    assert link.calls == []
    moved = second_peer(1, "10.0.1.0/24"), second_peer(2, "10.0.2.0/24", "10.0.9.1/32")
    peers.sync(link, moved, made=False)
    assert link.peers() == {each.key: each.allowed for each in moved}
    assert [call for call in link.calls if call.key == DUMMY_KEY] == [], "no address is without a peer"
    peers.sync(link, [second_peer(2, "10.0.2.0/24")], made=False)
    assert link.peers() == {two.key: two.allowed}
    link.table.clear()
    peers.sync(link, [two], made=True)
    assert link.peers() == {two.key: two.allowed}


def test_a_node_has_its_own_addresses_and_its_pods_in_the_programs() -> None:
    addresses = {Family.IPV4: ip_address("192.0.2.1"), Family.IPV6: ip_address("fd00::1")}
    node = RotatingNode("c/a", key(1), "ready", addresses, frozenset([ip_network("10.0.1.0/24")]))
    assert set(map(str, node.prefixes)) == {"192.0.2.1/32", "fd00::1/128", "10.0.1.0/24"}
