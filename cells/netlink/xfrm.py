"""IPsec states and policies in the kernel (XFRM) over netlink: message codecs, and XfrmKernel to use them.

It works on the security associations and the policy database (RFC 4301, 4.4) of the network namespace; the
IPsec cell uses it. pyroute2 has no XFRM. Source: linux/xfrm.h. Keys appear in no text, log or table.
"""

from __future__ import annotations

import errno
import hmac
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final, NoReturn, TypeVar

import msgspec
from anyio import to_thread

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.netlink.connection import NetlinkError, connected
from cells.netlink.wire import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    Request,
    attribute,
    select_attributes,
    u32,
)

__all__ = [
    "NETLINK_XFRM",
    "REQUEST_ID",
    "XFRM_CHANGES",
    "XFRM_REMOVALS",
    "Algorithm",
    "Direction",
    "KeyOctets",
    "XfrmKernel",
    "XfrmMark",
    "XfrmPolicy",
    "XfrmState",
    "XfrmTemplate",
]

NETLINK_XFRM: Final = 6
XFRM_CHANGES: Final = 0x4 | 0x8
"""Mask of the multicast groups of state and policy changes (XFRMNLGRP_SA, XFRMNLGRP_POLICY)."""

IPPROTO_ESP: Final = 50
REQUEST_ID: Final = 1
"""The reqid that links policy templates to states."""
REPLAY_WINDOW: Final = 1024
"""Size of the anti-replay window in packets (RFC 4303, 3.4.3)."""

XFRM_MSG_NEWSA, XFRM_MSG_DELSA, XFRM_MSG_GETSA = 0x10, 0x11, 0x12
XFRM_MSG_DELPOLICY, XFRM_MSG_GETPOLICY, XFRM_MSG_UPDPOLICY = 0x14, 0x15, 0x19
XFRM_MSG_FLUSHSA, XFRM_MSG_FLUSHPOLICY = 0x1C, 0x1D
XFRM_REMOVALS: Final = (XFRM_MSG_DELSA, XFRM_MSG_DELPOLICY, XFRM_MSG_FLUSHSA, XFRM_MSG_FLUSHPOLICY)
"""Message types of these groups that announce removals."""
_ALG_CRYPT, _TEMPLATES, _ALG_AEAD, _ALG_AUTH, _MARK, _REPLAY_ESN = 2, 5, 18, 20, 21, 23
_SET_MARK, _SET_MARK_MASK = 29, 30
_MODE_TUNNEL: Final = 1
_STATE_ESN: Final = 128
_FOREVER: Final = 0xFFFFFFFFFFFFFFFF

_SELECTOR = struct.Struct("=16s16s8xHBBB3xiI")
"""Destination, source, ports, family, the lengths of both prefixes, protocol, interface, user."""
_LIMITS = struct.Struct("=4Q32x")
"""struct xfrm_lifetime_cfg: soft and hard limits of bytes and packets; times (0: unlimited)."""
_IDENTITY = struct.Struct("=16s4sB3x")
_STATE_TAIL = struct.Struct("=44xIIHBBB7x")
"""After the limits: lifetimes, statistics, sequence, reqid, family, mode, replay window, flags."""
_STATE_SIZE: Final = 224
_STATE_NAME = struct.Struct("=16s4sHBx")
_POLICY_TAIL = struct.Struct("=32xIIBBBB4x")
"""After the limits: lifetimes, priority, index, direction, action, flags, share."""
_POLICY_SIZE: Final = 168
_POLICY_NAME = struct.Struct("=IB3x")
_TEMPLATE = struct.Struct("=16s4sB3xH2x16sIBBBxIII")
_PAIR = struct.Struct("=II")
_ESN = struct.Struct("=6I")
_ALGORITHM = struct.Struct("=64sI")

T = TypeVar("T")


class KeyOctets:
    """The bytes of a key; its repr hides them, and it can be neither JSON-encoded nor pickled."""

    __slots__ = ("octets",)

    def __init__(self, octets: bytes) -> None:
        self.octets = octets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyOctets) and hmac.compare_digest(self.octets, other.octets)

    def __hash__(self) -> int:
        return hash((KeyOctets, self.octets))

    def __len__(self) -> int:
        return len(self.octets)

    def __repr__(self) -> str:
        return f"<{len(self.octets)} bytes>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled: it would be readable")


class Algorithm(msgspec.Struct, frozen=True):
    """An algorithm by its kernel name, with its key."""

    name: str
    key: KeyOctets
    icv_bits: int = 0
    """Length of the integrity check value, for AEAD and authentication; 0 for the default."""


class XfrmMark(msgspec.Struct, frozen=True):
    """A mark and mask: packets to match, or bits to set."""

    value: int
    mask: int

    def __str__(self) -> str:
        return f"{self.value:#x}/{self.mask:#x}"


class XfrmState(msgspec.Struct, frozen=True, kw_only=True):
    """A security association of ESP in tunnel mode: one direction between two nodes."""

    source: IPAddress
    destination: IPAddress
    spi: int
    mark: XfrmMark
    output_mark: XfrmMark
    """The mark of packets after encryption or decryption."""
    aead: Algorithm | None = None
    auth: Algorithm | None = None
    crypt: Algorithm | None = None
    extended: bool = True
    """Whether sequence numbers have 64 bits (ESN, RFC 4303, 2.2.1)."""

    @property
    def key(self) -> tuple[str, int, XfrmMark]:
        """The kernel's lookup key: unique among states, whatever their sources."""
        return str(self.destination), self.spi, self.mark

    def __str__(self) -> str:
        return f"state {self.source} to {self.destination}, SPI {self.spi}, mark {self.mark}"


class Direction(IntEnum):
    """The direction of a policy."""

    IN = 0
    OUT = 1
    FWD = 2


class XfrmTemplate(msgspec.Struct, frozen=True):
    """The state that a policy requires; without addresses any state with the reqid matches."""

    source: IPAddress | None = None
    destination: IPAddress | None = None
    spi: int = 0
    request: int = 0
    optional: bool = False


class XfrmPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy for packets from one network to another."""

    direction: Direction
    source: IPNetwork
    destination: IPNetwork
    mark: XfrmMark | None = None
    priority: int = 0
    block: bool = False
    templates: tuple[XfrmTemplate, ...] = ()

    @property
    def key(self) -> tuple[Direction, str, str, XfrmMark | None]:
        """The kernel's lookup key."""
        return self.direction, str(self.source), str(self.destination), self.mark

    def __str__(self) -> str:
        mark = f", mark {self.mark}" if self.mark else ""
        return f"policy {self.direction.name.lower()} {self.source} to {self.destination}{mark}"


# Message codecs.


def add_state(state: XfrmState) -> Request:
    """Encode a request to add a state. EEXIST: a state with its key exists."""
    family = _family(state.destination)
    window, flags = (0, _STATE_ESN) if state.extended else (32, 0)
    body = (
        bytes(_SELECTOR.size)
        + _IDENTITY.pack(_octets(state.destination), state.spi.to_bytes(4), IPPROTO_ESP)
        + _octets(state.source)
        + _LIMITS.pack(*(_FOREVER,) * 4)
        + _STATE_TAIL.pack(0, REQUEST_ID, family, _MODE_TUNNEL, window, flags)
    )
    for kind, one in ((_ALG_AEAD, state.aead), (_ALG_AUTH, state.auth), (_ALG_CRYPT, state.crypt)):
        if one is not None:
            body += attribute(kind, _algorithm(kind, one))
    if state.extended:
        words = REPLAY_WINDOW // 32
        body += attribute(_REPLAY_ESN, _ESN.pack(words, 0, 0, 0, 0, REPLAY_WINDOW) + bytes(4 * words))
    body += _mark(state.mark) + u32(_SET_MARK, state.output_mark.value)
    body += u32(_SET_MARK_MASK, state.output_mark.mask)
    return Request(f"add {state}", XFRM_MSG_NEWSA, NLM_F_CREATE | NLM_F_EXCL, body)


def delete_state(state: XfrmState) -> Request:
    """Encode a request to delete a state; a missing one is ignored."""
    name = _STATE_NAME.pack(
        _octets(state.destination), state.spi.to_bytes(4), _family(state.destination), IPPROTO_ESP
    )
    return Request(f"delete {state}", XFRM_MSG_DELSA, 0, name + _mark(state.mark), (errno.ESRCH,))


def set_policy(policy: XfrmPolicy) -> Request:
    """Encode a request to add or replace a policy, by its key."""
    body = (
        _selector(policy)
        + _LIMITS.pack(*(_FOREVER,) * 4)
        + _POLICY_TAIL.pack(policy.priority, 0, policy.direction, int(policy.block), 0, 0)
    )
    if policy.templates:
        family = _family(policy.source.network_address)
        body += attribute(_TEMPLATES, b"".join(_template(one, family) for one in policy.templates))
    if policy.mark is not None:
        body += _mark(policy.mark)
    return Request(f"set {policy}", XFRM_MSG_UPDPOLICY, 0, body)


def delete_policy(policy: XfrmPolicy) -> Request:
    """Encode a request to delete a policy; a missing one is ignored."""
    body = _selector(policy) + _POLICY_NAME.pack(0, policy.direction)
    if policy.mark is not None:
        body += _mark(policy.mark)
    return Request(f"delete {policy}", XFRM_MSG_DELPOLICY, 0, body, (errno.ENOENT,))


def read_state(body: bytes) -> XfrmState | None:
    """Decode a state; None unless it is ESP in tunnel mode with our reqid."""
    destination, spi, protocol = _IDENTITY.unpack_from(body, _SELECTOR.size)
    at = _SELECTOR.size + _IDENTITY.size
    _, request, family, mode, _, flags = _STATE_TAIL.unpack_from(body, _STATE_SIZE - _STATE_TAIL.size)
    if protocol != IPPROTO_ESP or mode != _MODE_TUNNEL or request != REQUEST_ID:
        return None
    kinds = frozenset((_ALG_AEAD, _ALG_AUTH, _ALG_CRYPT, _MARK, _SET_MARK, _SET_MARK_MASK))
    found = select_attributes(body, _STATE_SIZE, kinds)
    return XfrmState(
        source=_address(body[at : at + 16], family),
        destination=_address(destination, family),
        spi=int.from_bytes(spi),
        mark=XfrmMark(*_PAIR.unpack(found.get(_MARK, bytes(8)))),
        output_mark=XfrmMark(_number(found, _SET_MARK), _number(found, _SET_MARK_MASK)),
        aead=_read_algorithm(_ALG_AEAD, found),
        auth=_read_algorithm(_ALG_AUTH, found),
        crypt=_read_algorithm(_ALG_CRYPT, found),
        extended=bool(flags & _STATE_ESN),
    )


def sent_sequence(body: bytes) -> int | None:
    """Return the last sequence number that a state sent; None if it is not ours or has no ESN."""
    replay = select_attributes(body, _STATE_SIZE, frozenset((_REPLAY_ESN,))).get(_REPLAY_ESN)
    if replay is None or read_state(body) is None:
        return None
    _, sent, *_ = _ESN.unpack_from(replay)
    return int(sent)


def read_policy(body: bytes) -> XfrmPolicy | None:
    """Decode a policy; None for per-socket ones and those with ports, a protocol or an interface."""
    destination, source, family, to_bits, from_bits, protocol, link, _ = _SELECTOR.unpack_from(body)
    priority, _, direction, action, _, _ = _POLICY_TAIL.unpack_from(body, _POLICY_SIZE - _POLICY_TAIL.size)
    if direction > Direction.FWD or protocol or link or any(body[32:40]) or family not in _FAMILIES:
        return None
    found = select_attributes(body, _POLICY_SIZE, frozenset((_TEMPLATES, _MARK)))
    templates = found.get(_TEMPLATES, b"")
    return XfrmPolicy(
        direction=Direction(direction),
        source=ip_network((_address(source, family), from_bits)),
        destination=ip_network((_address(destination, family), to_bits)),
        mark=XfrmMark(*_PAIR.unpack(found[_MARK])) if any(found.get(_MARK, b"")) else None,
        priority=priority,
        block=bool(action),
        templates=tuple(_read_template(templates, at) for at in range(0, len(templates), _TEMPLATE.size)),
    )


def _selector(policy: XfrmPolicy) -> bytes:
    source, destination = policy.source, policy.destination
    return _SELECTOR.pack(
        _octets(destination.network_address),
        _octets(source.network_address),
        _family(source.network_address),
        destination.prefixlen,
        source.prefixlen,
        0,
        0,
        0,
    )


def _template(one: XfrmTemplate, family: int) -> bytes:
    any_algorithm = 0xFFFFFFFF
    return _TEMPLATE.pack(
        _octets(one.destination),
        one.spi.to_bytes(4),
        IPPROTO_ESP,
        family,
        _octets(one.source),
        one.request,
        _MODE_TUNNEL,
        0,
        int(one.optional),
        *(any_algorithm,) * 3,
    )


def _read_template(data: bytes, at: int) -> XfrmTemplate:
    destination, spi, _, family, source, request, _, _, optional, *_ = _TEMPLATE.unpack_from(data, at)
    return XfrmTemplate(
        _address(source, family) if any(source) else None,
        _address(destination, family) if any(destination) else None,
        int.from_bytes(spi),
        request,
        bool(optional),
    )


def _algorithm(kind: int, one: Algorithm) -> bytes:
    head = _ALGORITHM.pack(one.name.encode(), 8 * len(one.key))
    icv = b"" if kind == _ALG_CRYPT else one.icv_bits.to_bytes(4, "little")
    return head + icv + one.key.octets


def _read_algorithm(kind: int, found: Mapping[int, bytes]) -> Algorithm | None:
    if kind not in found:
        return None
    data = found[kind]
    name, bits = _ALGORITHM.unpack_from(data)
    begin = _ALGORITHM.size + (0 if kind == _ALG_CRYPT else 4)
    # For authentication the kernel fills in its default truncation length, so it is not compared.
    icv = int.from_bytes(data[_ALGORITHM.size : begin], "little") if kind == _ALG_AEAD else 0
    return Algorithm(name.rstrip(b"\0").decode(), KeyOctets(data[begin : begin + (bits + 7) // 8]), icv)


def _mark(mark: XfrmMark) -> bytes:
    return attribute(_MARK, _PAIR.pack(mark.value, mark.mask))


def _number(found: Mapping[int, bytes], kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), "little")


_FAMILIES: Final = {socket.AF_INET: Family.IPV4, socket.AF_INET6: Family.IPV6}


def _family(address: IPAddress) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _octets(address: IPAddress | None) -> bytes:
    return address.packed.ljust(16, b"\0") if address is not None else bytes(16)


def _address(octets: bytes, family: int) -> IPAddress:
    return IPv4Address(octets[:4]) if family == socket.AF_INET else IPv6Address(octets)


# Requests to the kernel.


class XfrmKernel:
    """The XFRM states and policies of this namespace.

    Methods for several rows return one error or None per row; the others raise NetlinkError.
    """

    async def states(self) -> list[XfrmState]:
        """Return all ESP tunnel states with our reqid, with their keys."""
        return await to_thread.run_sync(_dump, "list states", XFRM_MSG_GETSA, read_state)

    async def policies(self) -> list[XfrmPolicy]:
        """Return all policies that select by networks only."""
        return await to_thread.run_sync(_dump, "list policies", XFRM_MSG_GETPOLICY, read_policy)

    async def last_sequence(self) -> int | None:
        """Return the highest sequence number (lower 32 bits) that a state sent; None without states."""
        found = await to_thread.run_sync(_dump, "list states", XFRM_MSG_GETSA, sent_sequence)
        return max(found, default=None)

    async def add_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]:
        """Add states; return an error or None for each."""
        return await to_thread.run_sync(_each, [add_state(one) for one in states])

    async def delete_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]:
        """Delete states, ignoring missing ones; return an error or None for each."""
        return await to_thread.run_sync(_each, [delete_state(one) for one in states])

    async def set_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]:
        """Add or replace policies by key; return an error or None for each."""
        return await to_thread.run_sync(_each, [set_policy(one) for one in policies])

    async def delete_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]:
        """Delete policies, ignoring missing ones; return an error or None for each."""
        return await to_thread.run_sync(_each, [delete_policy(one) for one in policies])

    async def flush(self) -> None:
        """Delete all states and policies, including foreign ones. Raises NetlinkError."""
        await to_thread.run_sync(_flush)


def _flush() -> None:
    every_protocol = bytes(4)
    with connected(protocol=NETLINK_XFRM) as connection:
        connection.run(Request("flush states", XFRM_MSG_FLUSHSA, 0, every_protocol, (errno.ESRCH,)))
        connection.run(Request("flush policies", XFRM_MSG_FLUSHPOLICY, 0, b"", (errno.ESRCH,)))


def _dump(what: str, kind: int, read: Callable[[bytes], T | None]) -> list[T]:
    with connected(protocol=NETLINK_XFRM) as connection:
        rows = connection.dump(Request(what, kind, NLM_F_DUMP, b""))
    return [row for message in rows if (row := read(message.body)) is not None]


def _each(requests: Sequence[Request]) -> list[NetlinkError | None]:
    if not requests:
        return []
    results: list[NetlinkError | None] = []
    with connected(protocol=NETLINK_XFRM) as connection:
        for request in requests:
            try:
                connection.run(request)
            except NetlinkError as error:
                results.append(error)
            else:
                results.append(None)
    return results
