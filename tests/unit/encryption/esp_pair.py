"""Two nodes that exchange ESP packets, by their plans and a fake of the kernel's XFRM."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import Any

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
from tests.support.esp import covers, matching, unseal
from tests.unit.encryption.fakes import FakeXfrm

FIRST = "3+ rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128"
SECOND = "4+ rfc4106(gcm(aes)) 0102030405060708090a0b0c0d0e0f1011121314 128"
LONG = "5+ rfc4106(gcm(aes)) " + "ab" * 36 + " 128"
SECRET = b"what a pod says to another"
ROTATION = 300.0


def association(state: XfrmState, sequence: int) -> SecurityAssociation:
    """Convert an XFRM state to scapy's security association."""
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
    """A node with its plan for the other node, and a fake kernel that encrypts by it."""

    def __init__(self, number: int, mode: IpsecMode, boot: str) -> None:
        self.number = number
        self.mode = mode
        self.boot = boot
        self.now = 0.0
        self.kernel = FakeXfrm()
        self.sent: Counter[object] = Counter()
        self.restart()

    def restart(self) -> None:
        """Start another agent, without a key, with the same kernel."""
        self.ring = KeyRing(ROTATION, lambda: self.now)
        self.planned = IpsecPlan((), ())
        self.target = XfrmTarget(self.kernel, self.ring, lambda: self.planned)

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

    async def reconcile(self, others: Mapping[int, ClusterNode]) -> None:
        """Reconcile the kernel with the plan: first add, then remove, as the reconciler does."""
        numbers = {other.full_name: number for number, other in others.items()}
        self.planned = IpsecPlanner(self.mode).plan(self.node, others.values(), numbers, self.ring.current)
        rows: dict[Any, Any] = {one.key: one for one in self.planned.objects}
        there = await self.target.observe()
        await self.target.put({k: row for k, row in rows.items() if there.get(k) != row})
        await self.target.drop([k for k in there if k not in rows])

    def send(self, packet: IP | IPv6, mark: int) -> bytes | None:
        """Return the bytes sent for a marked packet: in clear without a policy; None if it is blocked."""
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
        """Decrypt a packet of node ``other``, with the mark that programs set; None without a state."""
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


def datagram(source: int, destination: int, family: Family) -> IP | IPv6:
    """A UDP datagram between pods of two nodes."""
    if family is Family.IPV4:
        network: IP | IPv6 = IP(src=f"10.0.{source}.9", dst=f"10.0.{destination}.9", id=7)
    else:
        network = IPv6(src=f"fd00::{source}:9", dst=f"fd00::{destination}:9")
    return type(network)(bytes(network / UDP(sport=1024, dport=53) / Raw(SECRET)))


def mark_for(number: int, spi: int) -> int:
    """Return the mark that programs at pods' links set."""
    return number << 16 | spi << 12 | ENCRYPT


class Pair:
    """Two nodes with different IDs for each other."""

    def __init__(self, *, tunnel: bool) -> None:
        mode = IpsecMode(families=tuple(Family), tunnel=tunnel)
        self.first = EspNode(1, mode, "11111111-1111-4111-8111-111111111111")
        self.second = EspNode(2, mode, "22222222-2222-4222-8222-222222222222")
        self.numbers = {self.first: 77, self.second: 4242}
        """The ID of each node on the other one."""

    async def load(self, node: EspNode, text: str) -> None:
        node.ring.load(text)
        await self.reconcile(node)

    async def reconcile(self, *nodes: EspNode) -> None:
        for node in nodes:
            other = self.other(node)
            await node.reconcile({self.numbers[other]: other.node})

    def other(self, node: EspNode) -> EspNode:
        return self.second if node is self.first else self.first

    def ways(self) -> Iterator[tuple[EspNode, EspNode, Family]]:
        for sender in (self.first, self.second):
            for family in Family:
                yield sender, self.other(sender), family

    def encrypted(self, sender: EspNode, receiver: EspNode, family: Family, spi: int) -> bytes | None:
        packet = datagram(sender.number, receiver.number, family)
        return sender.send(packet, mark_for(self.numbers[receiver], spi))

    def arrives(self, sender: EspNode, receiver: EspNode, family: Family, spi: int) -> bool:
        """Return whether the receiver decrypts a packet; fail if it is in clear text or has other content."""
        data = self.encrypted(sender, receiver, family, spi)
        if data is None:
            return False
        assert SECRET not in data
        read = receiver.receive(data, self.numbers[sender])
        assert read in (None, bytes(datagram(sender.number, receiver.number, family)))
        return read is not None
