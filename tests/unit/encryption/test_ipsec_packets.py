"""Two nodes whose plans exchange ESP, by a double of the kernel's XFRM that has the states of each.

Packets are encrypted by scapy, and read by the double of ESP that nodes of kernel tests have: what one gets
wrong, the other does not understand.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.ipsec import ESP, SecurityAssociation
from scapy.packet import Raw

from cells.base.addresses import Family
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.encryption.ipsec.keys import KeyRing
from cells.encryption.ipsec.plan import DECRYPT, ENCRYPT, IpsecMode, IpsecPlan, IpsecPlanner, XfrmTarget
from cells.netlink.xfrm import XfrmState
from tests.support.esp import covers, matching, seal, unseal
from tests.unit.encryption.fakes import FakeXfrm

pytestmark = pytest.mark.anyio

FIRST = "3+ rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128"
SECOND = "4+ rfc4106(gcm(aes)) 0102030405060708090a0b0c0d0e0f1011121314 128"
LONG = "5+ rfc4106(gcm(aes)) " + "ab" * 36 + " 128"
SECRET = b"what a pod says to another"
ROTATION = 300.0


def association(state: XfrmState, sequence: int) -> SecurityAssociation:
    """What scapy encrypts and decrypts by."""
    assert state.aead is not None
    kind = IP if state.source.version == 4 else IPv6
    return SecurityAssociation(
        ESP,
        spi=state.spi,
        seq_num=sequence,
        crypt_algo="AES-GCM",
        crypt_key=state.aead.key.octets,
        tunnel_header=kind(src=str(state.source), dst=str(state.destination)),
        esn_en=True,
        esn=0,
    )


class EspNode:
    """A node: its custodian's plan of the other, and the kernel that encrypts by it."""

    def __init__(self, number: int, mode: IpsecMode, boot: str) -> None:
        self.number = number
        self.mode = mode
        self.boot = boot
        self.now = 0.0
        self.ring = KeyRing(ROTATION, lambda: self.now)
        self.kernel = FakeXfrm()
        self.planned = IpsecPlan((), ())
        self.target = XfrmTarget(self.kernel, self.ring, lambda: self.planned)
        self.sent: Counter[object] = Counter()

    @property
    def node(self) -> ClusterNode:
        own = self.number
        return ClusterNode(
            cluster="default",
            name=f"n{own}",
            source=Source.CUSTOM_RESOURCE,
            addresses=(
                *(NodeIP(INTERNAL_IP, ip_address(each)) for each in (f"192.0.2.{own}", f"2001:db8::{own}")),
                *(NodeIP(CILIUM_INTERNAL_IP, ip_address(e)) for e in (f"10.0.{own}.1", f"fd00::{own}:1")),
            ),
            ipv4_alloc_cidrs=(ip_network(f"10.0.{own}.0/24"),),
            ipv6_alloc_cidrs=(ip_network(f"fd00::{own}:0/112"),),
            boot_id=self.boot,
        )

    async def reconcile(self, other: ClusterNode, number: int) -> None:
        """Make the kernel equal to the plan, as the reconciler does: first add, then remove."""
        key = self.ring.current
        assert key is not None
        self.planned = IpsecPlanner(self.mode).plan(self.node, [other], {other.full_name: number}, key)
        rows: dict[Any, Any] = {one.key: one for one in self.planned.objects}
        there = await self.target.observe()
        await self.target.put({k: row for k, row in rows.items() if there.get(k) != row})
        await self.target.drop([k for k in there if k not in rows])

    def send(self, packet: IP | IPv6, mark: int) -> bytes | None:
        """What leaves of a packet with this mark: clear if no policy takes it; None: it is blocked."""
        policy = matching(self.kernel.held_policies.values(), bytes(packet), mark)
        if policy is None:
            return bytes(packet)
        if policy.block:
            return None
        (template,) = policy.templates
        found = [
            one
            for one in self.kernel.held_states.values()
            if (one.source, one.destination, one.spi) == (template.source, template.destination, template.spi)
            and covers(one.mark, mark)
        ]
        return self._encrypted(packet, found[0]) if found else None

    def _encrypted(self, packet: IP | IPv6, state: XfrmState) -> bytes:
        self.sent[state.key] += 1
        return bytes(association(state, self.sent[state.key]).encrypt(packet))

    def receive(self, data: bytes, other: int) -> bytes | None:
        """What is in a packet from node ``other``, as the program at the device marks it; None: no state."""
        packet = IP(data) if data[0] >> 4 == 4 else IPv6(data)
        esp = bytes(packet[ESP])
        (spi,) = struct.unpack_from("!I", esp)
        found = [
            one
            for one in self.kernel.held_states.values()
            if (one.destination, one.spi) == (ip_address(packet.dst), spi)
            and covers(one.mark, other << 16 | DECRYPT)
        ]
        return unseal(found[0], esp) if found else None


def said(source: int, destination: int, family: Family) -> IP | IPv6:
    """A datagram of a pod of one node to a pod of another."""
    if family is Family.IPV4:
        network: IP | IPv6 = IP(src=f"10.0.{source}.9", dst=f"10.0.{destination}.9", id=7)
    else:
        network = IPv6(src=f"fd00::{source}:9", dst=f"fd00::{destination}:9")
    return type(network)(bytes(network / UDP(sport=1024, dport=53) / Raw(SECRET)))


def mark_for(number: int, spi: int) -> int:
    """What the program at the pod's link gives a packet."""
    return number << 16 | spi << 12 | ENCRYPT


class Pair:
    """Two nodes that know each other by numbers of their own."""

    def __init__(self, *, tunnel: bool) -> None:
        mode = IpsecMode(families=tuple(Family), tunnel=tunnel)
        self.first = EspNode(1, mode, "11111111-1111-4111-8111-111111111111")
        self.second = EspNode(2, mode, "22222222-2222-4222-8222-222222222222")
        self.numbers = {self.first: 77, self.second: 4242}
        """By which the other one knows it."""

    async def load(self, node: EspNode, text: str) -> None:
        node.ring.load(text)
        await self.reconcile(node)

    async def reconcile(self, *nodes: EspNode) -> None:
        for node in nodes:
            other = self.other(node)
            await node.reconcile(other.node, self.numbers[other])

    def other(self, node: EspNode) -> EspNode:
        return self.second if node is self.first else self.first

    def ways(self) -> Iterator[tuple[EspNode, EspNode, Family]]:
        for sender in (self.first, self.second):
            for family in Family:
                yield sender, self.other(sender), family

    def encrypted(self, sender: EspNode, receiver: EspNode, family: Family, spi: int) -> bytes | None:
        packet = said(sender.number, receiver.number, family)
        return sender.send(packet, mark_for(self.numbers[receiver], spi))

    def arrives(self, sender: EspNode, receiver: EspNode, family: Family, spi: int) -> bool:
        """Whether the receiver reads what the sender says, and nobody else does."""
        data = self.encrypted(sender, receiver, family, spi)
        if data is None:
            return False
        assert SECRET not in data
        read = receiver.receive(data, self.numbers[sender])
        assert read in (None, bytes(said(sender.number, receiver.number, family)))
        return read is not None


async def test_the_double_seals_what_scapy_reads_at_every_length() -> None:
    pair = Pair(tunnel=False)
    await pair.load(pair.first, FIRST)
    for state in pair.first.kernel.held_states.values():
        kind = IP if state.source.version == 4 else IPv6
        outside = kind(
            src=str(state.source), dst=str(state.destination), **{"proto" if kind is IP else "nh": 50}
        )
        for length in range(8):
            inside = bytes(IP(src="10.0.1.9", dst="10.0.2.9") / UDP() / Raw(bytes(length)))
            packet = kind(bytes(outside / Raw(seal(state, length + 1, inside))))
            assert bytes(association(state, length + 1).decrypt(packet)) == inside


@pytest.mark.parametrize("tunnel", [False, True])
async def test_each_node_reads_what_the_other_encrypts_and_nothing_leaves_in_clear(tunnel: bool) -> None:
    for text, spi in ((FIRST, 3), (LONG, 5)):
        pair = Pair(tunnel=tunnel)
        for node in (pair.first, pair.second):
            await pair.load(node, text)
        for sender, receiver, family in pair.ways():
            assert pair.arrives(sender, receiver, family, spi)
            data = pair.encrypted(sender, receiver, family, spi)
            assert data is not None
            outside = IP(data) if family is Family.IPV4 else IPv6(data)
            ends = sender.node.router_ip(family), receiver.node.router_ip(family)
            assert (ip_address(outside.src), ip_address(outside.dst)) == ends
            changed = bytes([*data[:-1], data[-1] ^ 1])
            assert receiver.receive(changed, pair.numbers[sender]) is None
            assert receiver.receive(data, pair.numbers[sender] + 1) is None, "a node's state reads another's"
            packet = said(sender.number, receiver.number, family)
            assert sender.send(packet, mark_for(9, spi)) is None, "for a node without states"
            assert sender.send(packet, mark_for(pair.numbers[receiver], 9)) is None, "of a key without states"


async def test_a_key_is_replaced_without_a_packet_lost() -> None:
    pair = Pair(tunnel=False)
    for node in (pair.first, pair.second):
        await pair.load(node, FIRST)

    def all_arrive(spi: int) -> bool:
        return all(pair.arrives(*way, spi) for way in pair.ways())

    assert all_arrive(3)
    on_its_way = pair.encrypted(pair.first, pair.second, Family.IPV4, 3)
    assert on_its_way is not None
    await pair.load(pair.second, SECOND)
    assert all_arrive(3), "while one of them does not have the new key"
    await pair.load(pair.first, SECOND)
    assert all_arrive(3)
    assert all_arrive(4)
    for node in (pair.first, pair.second):
        node.now += ROTATION - 1
    await pair.reconcile(pair.first, pair.second)
    assert pair.second.receive(on_its_way, pair.numbers[pair.first]) is not None
    for node in (pair.first, pair.second):
        node.now += 2
    await pair.reconcile(pair.first, pair.second)
    assert all_arrive(4)
    assert pair.second.receive(on_its_way, pair.numbers[pair.first]) is None
    assert not any(pair.arrives(*way, 3) for way in pair.ways())


async def test_a_node_that_boots_again_gets_keys_of_its_own() -> None:
    pair = Pair(tunnel=True)
    for node in (pair.first, pair.second):
        await pair.load(node, FIRST)
    before = pair.encrypted(pair.first, pair.second, Family.IPV4, 3)
    assert before is not None
    pair.second.boot = "33333333-3333-4333-8333-333333333333"
    await pair.reconcile(pair.second)
    assert not any(pair.arrives(*way, 3) for way in pair.ways())
    await pair.reconcile(pair.first)
    assert all(pair.arrives(*way, 3) for way in pair.ways())
    assert pair.second.receive(before, pair.numbers[pair.first]) is None
