"""Frames of an attacker: forged sources, malformed headers, tags, fragments, nested tunnels, and damaged
frames.

The same seed gives the same frames. Each has a number in its payload, which identifies it where it arrives.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import GRE, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

_MAGIC: Final = b"HOSTILE#"
_NUMBER: Final = re.compile(re.escape(_MAGIC) + b"(.{4})", re.DOTALL)
_BROADCAST: Final = "ff:ff:ff:ff:ff:ff"
_TAGS: Final[Sequence[Callable[[], Packet]]] = (
    lambda: Dot1Q(vlan=0),
    lambda: Dot1AD(vlan=0) / Dot1Q(vlan=0),
    lambda: Dot1Q(vlan=0, prio=7) / Dot1Q(vlan=0),
    lambda: Dot1AD(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=0),
    lambda: Dot1Q(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=0),
    lambda: Dot1Q(vlan=5),
    lambda: Dot1Q(vlan=0) / Dot1Q(vlan=5),
    lambda: Dot1AD(vlan=5) / Dot1Q(vlan=0),
)
_OPTIONS: Final = (b"\x01" * 4, b"\x94\x04\x00\x00", b"\x83\x07\x04\x0a\x01\x00\x0b\x00", b"\x44\x28\x05")
"""IPv4 options: none, router alert, a loose source route, a timestamp that is longer than the header."""
_QUOTING4: Final = ((3, 0), (3, 3), (3, 4), (5, 1), (11, 0), (12, 0))
_QUOTING6: Final = ((1, 0), (1, 4), (2, 0), (3, 0), (4, 0))
_OTHER_PROTOCOLS: Final = (0, 2, 33, 50, 51, 59, 89, 103, 112, 132, 136, 255)
_TYPES: Final = (0x8847, 0x8864, 0x88CC, 0x88B5, 0x0800, 0x86DD, 0x8100, 0x6558)
_SHORTEST: Final = 54
"""Minimum length in bytes of a truncated frame: its Ethernet and IPv6 headers."""
_LAYER: Final = {4: IP, 6: IPv6}
_ENCAPSULATED: Final = {4: 4, 6: 41}
"""The protocol numbers of IP in IP."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One frame, and its purpose: ``source`` and ``target`` may be forged."""

    number: int
    source: str
    target: str
    what: str
    frame: bytes

    def __str__(self) -> str:
        """What a failure report needs."""
        return f"{self.what} {self.source} > {self.target} (frame {self.number}: {self.frame[:90].hex()})"


def number_in(frame: bytes) -> int | None:
    """Return the number of the attack to which a frame belongs; None without one."""
    found = _NUMBER.search(frame)
    return int.from_bytes(found[1], "big") if found else None


class Attacker:
    """Generates frames between these MACs, from any of the sources to any of the targets."""

    def __init__(
        self,
        seed: int,
        macs: tuple[str, str],
        sources: Sequence[str],
        targets: Sequence[str],
        ports: Sequence[int],
        first: int = 1,
    ) -> None:
        """``first`` is the number of the first frame; ``macs``: the sender's and the receiver's."""
        self._random = Random(seed)  # noqa: S311  # the same frames each time
        self._macs = macs
        self._sources = {version: [ip for ip in sources if _version(ip) == version] for version in (4, 6)}
        self._targets = [ip for ip in targets if self._sources[_version(ip)]]
        self._ports = ports
        self._number = first - 1

    def frames(self, count: int) -> Iterator[Attack]:
        """Generate this number of frames."""
        for _ in range(count):
            yield self._attack()

    def _attack(self) -> Attack:
        pick = self._random
        self._number += 1
        target = pick.choice(self._targets)
        source = pick.choice(self._sources[_version(target)])
        what, inner = self._packet(source, target)
        frame = self._framed(inner, target)
        if pick.random() < 0.1:
            frame, what = self._damaged(frame), f"damaged {what}"
        return Attack(self._number, source, target, what, frame)

    def _mark(self) -> Packet:
        """Return the payload that identifies the frame, at an even offset, since transport checksums sum
        16-bit words.
        """
        return Raw(_MAGIC + struct.pack(">I", self._number) + bytes(self._random.choice((0, 0, 8, 600))))

    def _framed(self, inner: Packet, target: str) -> bytes:
        pick = self._random
        own, other = self._macs
        to = (
            other
            if pick.random() < 0.85
            else pick.choice((_BROADCAST, _group_mac(target), "02:00:00:00:00:99"))
        )
        frame: Packet = Ether(src=own, dst=to)
        if pick.random() < 0.25:
            frame /= pick.choice(_TAGS)()
        if pick.random() < 0.03:
            frame.lastlayer().type = pick.choice(_TYPES)
        return bytes(frame / inner)

    def _damaged(self, frame: bytes) -> bytes:
        """Change some bytes of the headers, or truncate the frame."""
        changed = bytearray(frame)
        for _ in range(self._random.randint(1, 3)):
            changed[self._random.randrange(12, min(len(changed), 80))] = self._random.randrange(256)
        shorter = self._random.randint(min(_SHORTEST, len(changed)), len(changed))
        return bytes(changed[: self._random.choice((len(changed), shorter))])

    def _packet(self, source: str, target: str) -> tuple[str, Packet]:
        kinds = (self._plain,) * 5 + (
            self._fragment,
            self._extended,
            self._error,
            self._other,
            self._tunnelled,
        )
        return self._random.choice(kinds)(source, target)

    def _header(self, source: str, target: str) -> Packet:
        hops = self._random.choice((64, 64, 64, 255, 2, 1, 0))
        if ":" in target:
            return IPv6(src=source, dst=target, hlim=hops)
        header = IP(src=source, dst=target, ttl=hops, id=self._random.randrange(65536))
        if self._random.random() < 0.1:
            header.options = [self._random.choice(_OPTIONS)]
        return header

    def _transport(self, target: str) -> tuple[str, Packet]:
        pick = self._random
        sport, dport = pick.choice((*self._ports, 40000)), pick.choice(self._ports)
        match pick.choice(("tcp", "tcp", "udp", "udp", "echo")):
            case "tcp":
                flags = pick.choice((2, 2, 16, 18, 17, 4, 20, 0, 3, 6, 63, pick.randrange(256)))
                return f"TCP {sport}>{dport} flags {flags:#x}", TCP(sport=sport, dport=dport, flags=flags)
            case "udp":
                return f"UDP {sport}>{dport}", UDP(sport=sport, dport=dport)
        kind = pick.choice((128, 129) if ":" in target else (0, 8, 13, 17))
        return f"ICMP type {kind}", _icmp(target, kind, 0, pick.choice((1, sport)))

    def _plain(self, source: str, target: str) -> tuple[str, Packet]:
        what, transport = self._transport(target)
        return what, self._header(source, target) / transport / self._mark()

    def _fragment(self, source: str, target: str) -> tuple[str, Packet]:
        """Return a first, later, only, or tiny fragment; of few datagrams, so that fragments meet."""
        pick = self._random
        offset, more, datagram = pick.choice((0, 0, 1, 3)), pick.choice((0, 1)), pick.randrange(4)
        what, transport = self._transport(target)
        header = self._header(source, target)
        number = {TCP: 6, UDP: 17}.get(type(transport), 58 if ":" in target else 1)
        body = bytes(header.copy() / transport / self._mark())[len(header) :]
        body = body[: pick.choice((len(body), len(body), 8))] if pick.random() < 0.2 else body
        if ":" in target:
            part = IPv6ExtHdrFragment(nh=number, offset=offset, m=more, id=datagram)
            return f"fragment {offset} of {what}", header / part / Raw(body)
        header.id, header.frag, header.flags, header.proto = datagram, offset, more, number
        return f"fragment {offset} of {what}", header / Raw(body)

    def _extended(self, source: str, target: str) -> tuple[str, Packet]:
        """Add extension headers; in IPv4, options."""
        what, transport = self._transport(target)
        header = self._header(source, target)
        if ":" not in target:
            header.options = self._random.sample(_OPTIONS[:3], 2)
            return f"{what} behind options", header / transport / self._mark()
        made = (
            IPv6ExtHdrHopByHop(),
            IPv6ExtHdrDestOpt(),
            IPv6ExtHdrRouting(type=self._random.choice((0, 2)), addresses=[target], segleft=1),
            IPv6ExtHdrFragment(id=9, m=0, offset=0),
        )
        for _ in range(self._random.choice((1, 2, 6, 7))):
            header /= self._random.choice(made).copy()
        return f"{what} behind extension headers", header / transport / self._mark()

    def _error(self, source: str, target: str) -> tuple[str, Packet]:
        """Return an ICMP error that quotes something that the target may have sent, or garbage."""
        pick = self._random
        kind, code = pick.choice(_QUOTING6 if ":" in target else _QUOTING4)
        peer = pick.choice([source, *self._sources[_version(target)]])
        _, about = self._transport(target)
        quoted = bytes(_LAYER[_version(target)](src=target, dst=peer) / about)
        quoted = pick.choice((quoted, quoted, quoted[:12], b"", bytes(48)))
        error = self._header(source, target) / _icmp(target, kind, code, 0) / Raw(quoted) / self._mark()
        return f"ICMP error {kind} {code}", error

    def _other(self, source: str, target: str) -> tuple[str, Packet]:
        """Return a packet of a protocol that policies cannot name."""
        header, protocol = self._header(source, target), self._random.choice(_OTHER_PROTOCOLS)
        setattr(header, "nh" if ":" in target else "proto", protocol)
        return f"protocol {protocol}", header / Raw(bytes(8)) / self._mark()

    def _tunnelled(self, source: str, target: str) -> tuple[str, Packet]:
        """Return a packet in a packet, as tunnel endpoints would decapsulate it."""
        inner_source = self._random.choice(self._sources[_version(target)])
        inner = _LAYER[_version(target)](src=inner_source, dst=target)
        inner = (
            inner
            / UDP(sport=self._random.choice(self._ports), dport=self._random.choice(self._ports))
            / self._mark()
        )
        header = self._header(source, target)
        if self._random.random() < 0.5:
            return "GRE", header / GRE() / inner
        setattr(header, "nh" if ":" in target else "proto", _ENCAPSULATED[_version(target)])
        return "IP in IP", header / inner


def _version(ip: str) -> int:
    return 6 if ":" in ip else 4


def _icmp(target: str, kind: int, code: int, identifier: int) -> Packet:
    """Return an ICMP message of the target's family; scapy fills in the checksum of ICMPv6."""
    if ":" not in target:
        return ICMP(type=kind, code=code, id=identifier)
    from scapy.layers.inet6 import ICMPv6Unknown

    return ICMPv6Unknown(type=kind, code=code, msgbody=struct.pack(">HH", identifier, 1))


def _group_mac(target: str) -> str:
    return "33:33:00:00:00:01" if ":" in target else "01:00:5e:00:00:01"
