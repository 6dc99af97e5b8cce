"""Messages between two nodes over a WireGuard device, by which they agree to use it while a key is rotated.

Source: packet(7), classic BPF of linux/filter.h, IPv4, IPv6 and UDP; the messages are our own.
Why:    a message that arrives proves that its session works in this direction. A packet socket receives it
        before programs and filters do. Afterwards, the kernel passes it to WireGuard's UDP socket on that
        port, which drops datagrams without a WireGuard message type.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import IntEnum
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Self

import msgspec
from anyio import wait_readable

from cells.base.addresses import IPAddress
from cells.cluster.encryption import WIREGUARD_PORT
from cells.netlink.connection import DROP, EQUAL, LOAD_BYTE, LOAD_WORD, MASK, PASS, RETURN, Filter

__all__ = ["MessageKind", "MessageSocket", "RotationMessage", "rotation_token"]

MAGIC: Final = b"hive"
"""First bytes of a message; WireGuard's own begin with a byte from 1 to 4."""
_BODY: Final = struct.Struct(">4sB8s")
_UDP: Final = struct.Struct(">HHHH")
_IPV4, _IPV6 = struct.Struct(">BBHHHBBH4s4s"), struct.Struct(">IHBB16s16s")
_LENGTH: Final = _UDP.size + _BODY.size
_HOPS: Final = 64


class MessageKind(IntEnum):
    """The purpose of a message."""

    ASK = 1
    """Do you receive this? Then send to me over this device, and answer IN_USE."""
    IN_USE = 2
    """I send to you over this device from now on."""


class RotationMessage(msgspec.Struct, frozen=True):
    """One datagram between two nodes."""

    source: IPAddress
    destination: IPAddress
    kind: MessageKind
    token: bytes
    """Token of the rotation, 8 bytes."""

    def pack(self) -> bytes:
        """The message with IP and UDP headers."""
        source, destination = self.source.packed, self.destination.packed
        body = _BODY.pack(MAGIC, self.kind, self.token)
        pseudo = source + destination + struct.pack(">HH", socket.IPPROTO_UDP, _LENGTH)
        ports = (WIREGUARD_PORT, WIREGUARD_PORT, _LENGTH)
        checksum = _checksum(pseudo + _UDP.pack(*ports, 0) + body) or 0xFFFF
        datagram = _UDP.pack(*ports, checksum) + body
        if self.source.version == 6:
            return _IPV6.pack(6 << 28, _LENGTH, socket.IPPROTO_UDP, _HOPS, source, destination) + datagram
        fields = (0x45, 0, _IPV4.size + _LENGTH, 0, 0, _HOPS, socket.IPPROTO_UDP)
        header = _IPV4.pack(*fields, 0, source, destination)
        return _IPV4.pack(*fields, _checksum(header), source, destination) + datagram

    @classmethod
    def unpack(cls, packet: bytes) -> Self | None:
        """The message in a packet; None for other packets."""
        source: IPAddress
        destination: IPAddress
        if packet[:1] == b"\x45" and len(packet) == _IPV4.size + _LENGTH:
            *_, protocol, _, saddr, daddr = _IPV4.unpack_from(packet)
            source, destination = IPv4Address(saddr), IPv4Address(daddr)
        elif packet[:1] == b"\x60" and len(packet) == _IPV6.size + _LENGTH:
            _, _, protocol, _, saddr, daddr = _IPV6.unpack_from(packet)
            source, destination = IPv6Address(saddr), IPv6Address(daddr)
        else:
            return None
        datagram = packet[-_LENGTH:]
        sport, dport, _, _ = _UDP.unpack_from(datagram)
        magic, kind, token = _BODY.unpack_from(datagram, _UDP.size)
        if (protocol, sport, dport, magic) != (socket.IPPROTO_UDP, WIREGUARD_PORT, WIREGUARD_PORT, MAGIC):
            return None
        if kind not in tuple(MessageKind):
            return None
        return cls(source, destination, MessageKind(kind), token)


def rotation_token(key: str) -> bytes:
    """The token of a rotation to a public key."""
    return sha256(key.encode()).digest()[:8]


def _checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    return ~(int.from_bytes(data, "big") % 0xFFFF) & 0xFFFF


# The socket.

_ETH_P_IP, _ETH_P_IPV6, _ETH_P_ALL = 0x0800, 0x86DD, 3
_SO_ATTACH_FILTER: Final = 26
_SOL_PACKET, _QDISC_BYPASS, _IGNORE_OUTGOING = 263, 20, 23
_ARRIVED_AT: Final = 0xFFFFF008
"""SKF_AD_OFF + SKF_AD_IFINDEX: the filter reads the index of the device there."""
_LONGEST: Final = _IPV6.size + _LENGTH


class MessageSocket:
    """Sends and receives messages over WireGuard devices. Raises OSError if it lacks CAP_NET_RAW."""

    def __init__(self) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_PACKET, kind, socket.htons(_ETH_P_ALL))
        try:
            self._socket.setsockopt(_SOL_PACKET, _QDISC_BYPASS, 1)  # past programs: they see what comes out
            self._socket.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
            self.listen(())
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def listen(self, ifindexes: Collection[int]) -> None:
        """Receive messages over these devices only. Raises OSError."""
        lines = _messages_at(tuple(ifindexes))
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
        program = struct.pack("@HP", len(lines), ctypes.addressof(code))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def send(self, device: str, message: RotationMessage) -> None:
        """Send a message over a device. Raises OSError."""
        protocol = _ETH_P_IPV6 if message.source.version == 6 else _ETH_P_IP
        self._socket.sendto(message.pack(), (device, protocol))

    async def wait(self) -> Iterator[tuple[str, RotationMessage]]:
        """Wait for messages; each comes with the name of its device. Raises OSError."""
        await wait_readable(self._socket)
        return self._received()

    def _received(self) -> Iterator[tuple[str, RotationMessage]]:
        with suppress(BlockingIOError):
            while True:
                packet, address = self._socket.recvfrom(_LONGEST + 1)
                if (message := RotationMessage.unpack(packet)) is not None:
                    yield address[0], message


def _messages_at(ifindexes: tuple[int, ...]) -> Filter:
    """A filter for these devices, and for the magic after the UDP header of either family."""
    if not ifindexes:
        return [(RETURN, 0, 0, DROP)]
    rest: list[tuple[int, int, int, int]] = [
        (LOAD_BYTE, 0, 0, 0),
        (MASK, 0, 0, 0xF0),
        (EQUAL, 2, 0, 0x60),
        (LOAD_WORD, 0, 0, _IPV4.size + _UDP.size),
        (EQUAL, 2, 3, int.from_bytes(MAGIC, "big")),
        (LOAD_WORD, 0, 0, _IPV6.size + _UDP.size),
        (EQUAL, 0, 1, int.from_bytes(MAGIC, "big")),
        (RETURN, 0, 0, PASS),
        (RETURN, 0, 0, DROP),
    ]
    count = len(ifindexes)
    chosen = [
        (EQUAL, count - number - 1, 0 if number < count - 1 else len(rest) - 1, ifindex)
        for number, ifindex in enumerate(ifindexes)
    ]
    return [(LOAD_WORD, 0, 0, _ARRIVED_AT), *chosen, *rest]
