"""Attacks on running nodes: who sends forged frames, who receives them, and what a plain model allows.

Frames are written to links (AF_PACKET) and read where they arrive: on pods' links, and by raw sockets of the
node, which receive what its stack accepts.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from scapy.layers.inet import UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from hive.lab.namespaces import Namespaces, inside
from tests.kernel.datapath.model_packet import Address, Flow, Fragments, RefusedError, read
from tests.kernel.datapath.packets import ip
from tests.support.hostile_frames import Attack, Attacker, number_in
from tests.support.waiting import eventually

UDP_PORT: Final = 7001
"""The port at which pods respond where policy allows any ingress."""
_ALL: Final = 3
_SO_RCVBUFFORCE: Final = 33
_ROOM: Final = 64 << 20
_EVERY: Final = 10
"""Number of attacks between two allowed packets."""
_ALLOWED_FROM: Final = 0x40000000
_RAW4: Final = (1, 4, 6, 17, 33, 41, 47, 50, 51, 89, 103, 112, 132, 136, 255)
_RAW6: Final = (4, 6, 17, 41, 47, 50, 58, 89, 103, 112, 132, 136)
"""Protocols of transports and tunnels; extension headers come before these."""
_NEIGHBOURS: Final = range(130, 138)
"""ICMPv6 types that a node accepts whatever its policy."""
_ICMPV6: Final = 58
_ICMPV6_ERRORS: Final = 128
"""The first ICMPv6 type that is not an error."""
_ICMP: Final = 1
_ICMP_ERRORS: Final = (3, 11, 12)
_OWN_ERRORS: Final = {(1, 3, 1), (_ICMPV6, 1, 3)}
"""Protocol, type and code of errors that a node receives from itself, about replies to unreachable addresses.
"""

MayGet = Callable[["Sender", Flow], bool]
"""Whether policy allows this packet from that sender to a receiver."""


def mac_of(where: Namespaces, link: str) -> str:
    """Return the MAC of a link inside."""
    with link_socket(where, link) as sock:
        return str(sock.getsockname()[4].hex(":"))


def link_socket(where: Namespaces, link: str, protocol: int = _ALL) -> socket.socket:
    """Open a socket that reads and writes frames of a link. Raises OSError."""
    with inside(where):
        found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
        found.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
        found.bind((link, protocol))
    found.setblocking(False)
    return found


@dataclass
class Sender:
    """An attacker: its link, and the addresses it uses."""

    name: str
    sock: socket.socket
    attacker: Attacker
    own: frozenset[Address] = frozenset()
    """A pod's own addresses, the only ones it may send from. An outsider has none: any except the node's are
    allowed.
    """
    as_world: frozenset[Address] = frozenset()
    """Addresses of a node that belong to the world by this path: see docs/understand/datapath.md."""
    wrapped: Callable[[bytes], bytes] = bytes
    """The frame as it is sent, for instance encapsulated."""
    believed: bool = True
    """Whether any of its frames may arrive."""

    def send(self, frame: bytes) -> None:
        """Send frames; those that the link does not accept are skipped."""
        with contextlib.suppress(OSError):
            self.sock.send(self.wrapped(frame))


@dataclass
class Receiver:
    """A pod's link, and who may reach the pod."""

    name: str
    sock: socket.socket
    addresses: frozenset[Address]
    may_get: MayGet
    fragments: Fragments = field(default_factory=dict)

    def frames(self) -> Iterator[bytes]:
        """Return the received frames."""
        while True:
            try:
                frame, (_, _, kind, *_) = self.sock.recvfrom(65535)
            except BlockingIOError:
                return
            if kind != socket.PACKET_OUTGOING:
                yield frame


@dataclass
class HostReceiver:
    """A node's stack: what it accepts for itself."""

    name: str
    socks: list[tuple[int, socket.socket]]
    """Sockets by protocol; those of IPv6 are the second half."""
    may_get: Callable[[Sender, int, bytes], bool]
    """Decides by the protocol and what follows the network header."""

    def packets(self) -> Iterator[tuple[int, bytes]]:
        """Return received packets: the protocol, and what follows the network header."""
        for protocol, sock in self.socks:
            while True:
                try:
                    packet = sock.recv(65535)
                except BlockingIOError:
                    break
                yield protocol, packet[(packet[0] & 15) * 4 :] if sock.family == socket.AF_INET else packet


def quotes_answer(protocol: int, payload: bytes, port: int) -> bool:
    """Return whether an ICMP error, without its network header, quotes a node's reply from this UDP port."""
    kind, quoted = payload[0], payload[8:]
    if protocol == _ICMPV6:
        return kind < _ICMPV6_ERRORS and quoted[6:7] == b"\x11" and quoted[40:42] == port.to_bytes(2, "big")
    if protocol != _ICMP or kind not in _ICMP_ERRORS or not quoted:
        return False
    at = (quoted[0] & 15) * 4
    return quoted[9:10] == b"\x11" and quoted[at : at + 2] == port.to_bytes(2, "big")


@contextmanager
def host_receiver(
    name: str, where: Namespaces, may_get: Callable[[Sender, int, bytes], bool]
) -> Iterator[HostReceiver]:
    """Open raw sockets in a node."""
    with ExitStack() as stack:
        socks = []
        with inside(where):
            for family, protocols in ((socket.AF_INET, _RAW4), (socket.AF_INET6, _RAW6)):
                for protocol in protocols:
                    sock = stack.enter_context(socket.socket(family, socket.SOCK_RAW, protocol))
                    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
                    sock.setblocking(False)
                    socks.append((protocol, sock))
        yield HostReceiver(name, socks, may_get)


class Field:
    """Senders, receivers, and the results so far."""

    def __init__(
        self,
        senders: list[Sender],
        receivers: list[Receiver],
        hosts: list[HostReceiver],
        local: set[Address],
        nodes: set[Address],
        allowed: dict[str, Callable[[int], bytes]],
    ) -> None:
        """``local``: addresses that no outsider has; ``nodes``: the nodes' addresses.

        ``allowed``: by sender, frames with a number that must arrive.
        """
        self._senders = senders
        self._receivers = receivers
        self._hosts = hosts
        self._local = local
        self._nodes = nodes
        self._allowed = allowed
        self._sent: dict[int, tuple[Sender, Attack]] = {}
        self._expected: dict[int, str] = {}
        self._arrived: set[int] = set()
        self.wrong: list[str] = []
        """Frames that arrived where policy forbids them."""

    def attack(self, count: int) -> None:
        """Have each sender send this number of frames, and allowed packets between them."""
        for sender in self._senders:
            for attack in sender.attacker.frames(count):
                self._sent[attack.number] = sender, attack
                sender.send(attack.frame)
                if attack.number % _EVERY == 0 and sender.name in self._allowed:
                    number = _ALLOWED_FROM + attack.number
                    self._expected[number] = sender.name
                    sender.send(self._allowed[sender.name](number))
                if attack.number % 256 == 0:
                    self._look()

    def settle(self) -> None:
        """Wait until all allowed packets have arrived, then check the other ones. Raises AssertionError."""
        eventually(self._all_arrived, within=20)
        self._look()
        assert not self.wrong, "\n".join(self.wrong[:20])

    def _all_arrived(self) -> bool:
        self._look()
        missing = {name for number, name in self._expected.items() if number not in self._arrived}
        if missing:
            raise AssertionError(f"packets that are allowed have not arrived: from {sorted(missing)}")
        return True

    def _look(self) -> None:
        for receiver in self._receivers:
            for frame in receiver.frames():
                self._check(receiver, frame)
        for host in self._hosts:
            for protocol, payload in host.packets():
                self._check_host(host, protocol, payload)

    def _check(self, receiver: Receiver, frame: bytes) -> None:
        number = number_in(frame)
        if number is not None and number >= _ALLOWED_FROM:
            self._arrived.add(number)
            return
        sender, attack = self._sent.get(number or 0, (None, None))
        if sender is None or attack is None or sender.name == receiver.name:
            return
        try:
            flow = read(frame, receiver.fragments)
        except RefusedError as refused:
            self.wrong.append(
                f"{receiver.name} got {frame[:90].hex()}, unreadable ({refused.reason}): {attack}"
            )
            return
        if (
            flow.source in self._nodes
            and ip_address(attack.source) in receiver.addresses
            and flow.answer_likely
        ):
            return  # the node answers the forged source of the frame
        forged = flow.source not in sender.own if sender.own else flow.source in self._local - sender.as_world
        mine = flow.destination in receiver.addresses
        if forged or not mine or not sender.believed or not receiver.may_get(sender, flow):
            self.wrong.append(f"{receiver.name} got of {sender.name} {frame[:90].hex()}: {attack}")

    def _check_host(self, host: HostReceiver, protocol: int, payload: bytes) -> None:
        sender, attack = self._sent.get(number_in(payload) or 0, (None, None))
        if sender is None or (protocol == _ICMPV6 and payload[0] in _NEIGHBOURS):
            return
        if (protocol, *payload[:2]) in _OWN_ERRORS:
            return
        if not host.may_get(sender, protocol, payload):
            self.wrong.append(f"{host.name} took of {sender.name} {protocol} {payload[:60].hex()}: {attack}")


def datagram(macs: tuple[str, str], source: str, target: str) -> Callable[[int], bytes]:
    """Return allowed frames by their number."""

    def made(number: int) -> bytes:
        body = Raw(b"HOSTILE#" + struct.pack(">I", number))
        packet = ip(source, target) / UDP(sport=40000, dport=UDP_PORT) / body
        return bytes(Ether(src=macs[0], dst=macs[1]) / packet)

    return made


def addresses(*texts: str) -> frozenset[IPv4Address | IPv6Address]:
    """Parse addresses."""
    return frozenset(ip_address(text) for text in texts if text)
