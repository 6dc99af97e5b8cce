"""A substitute for a kernel with ESP: encrypts the packets of a TUN device by XFRM states and policies.

Why: kernels of tests may lack ESP. Packets travel between real namespaces, where they can be captured.
Source: RFC 4303 (ESP with extended sequence numbers, 2.2.1), RFC 4106 (AES-GCM), RFC 4301 (4.4.1, 5.1, 5.2).
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from typing import Final

import anyio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cells.base.addresses import Family, IPAddress
from cells.encryption.ipsec.plan import XfrmEdge
from cells.netlink.xfrm import Direction, XfrmMark, XfrmPolicy, XfrmState
from tests.support.tun import open_tun

_HEADER: Final = struct.Struct("!II")
"""SPI and sequence number."""
_AAD: Final = struct.Struct("!III")
_IV, _SALT = 8, 4
_PROTOCOLS: Final = {4: 4, 6: 41}
"""Next header values of the inner packet in tunnel mode."""
_LONGEST: Final = 65536


def covers(mark: XfrmMark | None, packet: int) -> bool:
    """Return whether the mark of a state or policy matches a packet's mark."""
    return mark is None or packet & mark.mask == mark.value


def matching(policies: Iterable[XfrmPolicy], packet: bytes, mark: int) -> XfrmPolicy | None:
    """Return the policy of an outgoing packet; None if it leaves unchanged."""
    source, destination = addresses(packet)
    found = [
        one
        for one in policies
        if one.direction is Direction.OUT
        and one.source.version == source.version
        and source in one.source
        and destination in one.destination
        and covers(one.mark, mark)
    ]
    return min(found, key=lambda one: one.priority, default=None)


def addresses(packet: bytes) -> tuple[IPAddress, IPAddress]:
    """Return source and destination of an IP packet."""
    if packet[0] >> 4 == 4:
        return ip_address(packet[12:16]), ip_address(packet[16:20])
    return ip_address(packet[8:24]), ip_address(packet[24:40])


def seal(state: XfrmState, sequence: int, packet: bytes) -> bytes:
    """Encrypt a packet by a state; return the ESP packet without the outer header."""
    trailer = bytes(range(1, -(len(packet) + 2) % 4 + 1))
    plain = packet + trailer + bytes([len(trailer), _PROTOCOLS[packet[0] >> 4]])
    iv = sequence.to_bytes(_IV)
    cipher, salt = _cipher(state)
    sealed: bytes = cipher.encrypt(salt + iv, plain, _aad(state, sequence))
    return _HEADER.pack(state.spi, sequence) + iv + sealed


def unseal(state: XfrmState, esp: bytes) -> bytes | None:
    """Decrypt an ESP packet; None if the state's key does not verify it."""
    _, sequence = _HEADER.unpack_from(esp)
    iv, sealed = esp[_HEADER.size : _HEADER.size + _IV], esp[_HEADER.size + _IV :]
    cipher, salt = _cipher(state)
    try:
        plain: bytes = cipher.decrypt(salt + iv, sealed, _aad(state, sequence))
    except InvalidTag:
        return None
    padding, following = plain[-2], plain[-1]
    if following != _PROTOCOLS.get(plain[0] >> 4):
        return None
    return plain[: len(plain) - 2 - padding]


def _cipher(state: XfrmState) -> tuple[AESGCM, bytes]:
    assert state.aead is not None
    octets = state.aead.key.octets
    return AESGCM(octets[:-_SALT]), octets[-_SALT:]


def _aad(state: XfrmState, sequence: int) -> bytes:
    """Return the additional data, with the upper half of the sequence number, which is not sent."""
    return _AAD.pack(state.spi, 0, sequence)


class EspDevice:
    """A node's TUN device between its pods and the network.

    ``mark``: the mark that the programs give a packet for a destination; ``sender``: the mark for packets
    from an address of another node. Lost packets are counted by reason, in the terms of /proc/net/xfrm_stat.
    """

    def __init__(
        self, kernel: XfrmEdge, mark: Callable[[IPAddress], int], sender: Callable[[IPAddress], int]
    ) -> None:
        self._kernel = kernel
        self._mark = mark
        self._sender = sender
        self._sequences: Counter[object] = Counter()
        self._seen: set[tuple[object, int]] = set()
        self._wires: dict[Family, socket.socket] = {}
        self.counts: Counter[str] = Counter()

    @contextmanager
    def opened(self, name: str, routers: Iterable[IPAddress]) -> Iterator[int]:
        """Open the device, which is down, and sockets for ESP to and from the router's addresses."""
        with ExitStack() as stack:
            for router in routers:
                family = Family.of(router)
                kind = socket.AF_INET if family is Family.IPV4 else socket.AF_INET6
                wire = stack.enter_context(socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_ESP))
                wire.bind((str(router), 0))
                wire.setblocking(False)
                self._wires[family] = wire
            tun = open_tun(name)
            stack.callback(os.close, tun)
            yield tun

    async def run(self, tun: int) -> None:
        """Carry packets both ways until it is cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._outwards, tun)
            for wire in self._wires.values():
                group.start_soon(self._inwards, wire, tun)

    async def _outwards(self, tun: int) -> None:
        while True:
            await anyio.wait_readable(tun)
            packet = os.read(tun, _LONGEST)
            if packet[0] >> 4 == 6 and addresses(packet)[1].is_multicast:
                continue  # of the device's own: neighbours are not looked for on it
            await self.send(packet)

    async def send(self, packet: bytes) -> None:
        """Send a pod's packet according to states and policies."""
        mark = self._mark(addresses(packet)[1])
        policy = matching(await self._kernel.policies(), packet, mark)
        if policy is None:
            self.counts["in clear"] += 1
            return
        if policy.block:
            self.counts["XfrmOutPolBlock"] += 1
            return
        (template,) = policy.templates
        wanted = template.source, template.destination, template.spi
        for state in await self._kernel.states():
            if (state.source, state.destination, state.spi) == wanted and covers(state.mark, mark):
                self._sequences[state] += 1
                sealed = seal(state, self._sequences[state], packet)
                self._wires[Family.of(state.source)].sendto(sealed, (str(state.destination), 0))
                self.counts["sent"] += 1
                return
        self.counts["XfrmOutNoStates"] += 1

    async def _inwards(self, wire: socket.socket, tun: int) -> None:
        own = ip_address(wire.getsockname()[0])
        while True:
            await anyio.wait_readable(wire)
            data, (source, *_) = wire.recvfrom(_LONGEST)
            esp = data[(data[0] & 0xF) * 4 :] if own.version == 4 else data
            if (packet := await self.receive(own, self._sender(ip_address(source)), esp)) is not None:
                os.write(tun, packet)

    async def receive(self, own: IPAddress, mark: int, esp: bytes) -> bytes | None:
        """Return the decrypted packet received at this address with a mark; None if it is lost."""
        spi, sequence = _HEADER.unpack_from(esp)
        for state in await self._kernel.states():
            if (state.destination, state.spi) == (own, spi) and covers(state.mark, mark):
                packet = unseal(state, esp)
                if packet is None:
                    self.counts["XfrmInStateProtoError"] += 1
                elif (state, sequence) in self._seen:
                    self.counts["XfrmInStateSeqError"] += 1
                else:
                    self._seen.add((state, sequence))
                    self.counts["received"] += 1
                    return packet
                return None
        self.counts["XfrmInNoStates"] += 1
        return None
