"""Decodes events of the datapath, the proxies and the agent to typed records.

Source: Cilium 1.16/1.17, bpf/lib/{drop,trace,trace_sock,policy_log,common}.h: version 1, little endian;
pkg/monitor/api for the agent's notifications.
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

from cells.observe.events import gob
from cells.observe.events.access_log import REQUEST, LookupRecord, RequestRecord, read_lookup, read_request

DROP: Final = 1
TRACE: Final = 4
VERDICT: Final = 5
TRACE_SOCK: Final = 7
NOTIFICATION: Final = 130

VERSION: Final = 1

_head = struct.Struct("<BBHIIHH")  # type, subtype, source, hash; original length, captured length, version
_drop = struct.Struct("<IIIHBbI")
_trace = struct.Struct("<IIHBBI16s")
_trace_sock = struct.Struct("<BB16sHQQBB")
_verdict = struct.Struct("<IiHBBB3x")

_IPV6: Final = 1 << 0  # of the flags of a trace
_ENCRYPTED: Final = 0x80  # of its reason
_OUTGOING: Final = 2  # of the two direction bits of a verdict, where 1 is in


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """A dropped packet; ``packet`` has its first bytes, from the Ethernet header on."""

    source: int
    """The endpoint of the program that reports; 0 if unknown."""
    hash: int
    """The kernel's flow hash, 0 if it has none."""
    reason: int
    """See reason_name()."""
    length: int
    """Length of the packet; ``packet`` may be shorter."""
    source_identity: int
    destination_identity: int
    destination: int
    """The destination endpoint; 0 if unknown."""
    line: int
    """Line in the datapath's source; 0 if not reported."""
    file: int
    ext_error: int
    """Error of the kernel, for some reasons."""
    ifindex: int
    packet: bytes


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A packet at an observation point of the datapath; ``packet`` has its first bytes."""

    source: int
    """The endpoint of the program that reports; 0 if none."""
    hash: int
    point: int
    """See OBSERVATION_POINTS."""
    length: int
    source_identity: int
    destination_identity: int
    destination: int
    """The destination endpoint; 0 if none."""
    reason: int
    """The conntrack state: see TRACE_REASONS."""
    encrypted: bool
    ipv6: bool
    ifindex: int
    """The output device; 0 if the network stack will choose it."""
    original_ip: IPv4Address | IPv6Address
    """The source address before translation; unspecified if it was not translated."""
    packet: bytes


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of an endpoint's policy on a packet."""

    source: int
    """The endpoint."""
    hash: int
    length: int
    remote_identity: int
    verdict: int
    """0: allow; positive: the proxy port; negative: the negated drop reason."""
    port: int
    """The destination port or ICMP type of the policy lookup."""
    protocol: int
    egress: bool
    ipv6: bool
    match: int
    """The type of the matching entry: see MATCH_TYPES."""
    audited: bool
    """Whether the packet was forwarded despite the verdict, in audit mode."""
    auth: int
    packet: bytes


class TraceSock(msgspec.Struct, frozen=True, kw_only=True):
    """A socket-level translation of a service to a backend, or the reverse."""

    point: int
    """See SOCKET_POINTS."""
    address: IPv4Address | IPv6Address
    """Address of the service or backend at this point."""
    port: int
    cookie: int
    """Cookie of the socket."""
    cgroup: int
    """Id of the process's cgroup."""
    protocol: int
    """See SOCKET_PROTOCOLS."""


class Raw(msgspec.Struct, frozen=True):
    """An undecoded event of an unknown type or version; up to 7 bytes of padding may follow."""

    data: bytes


class AgentNotification(msgspec.Struct, frozen=True):
    """A notification of the agent about a change."""

    kind: int
    """See NOTIFICATIONS."""
    text: str
    """The change, in JSON."""

    @property
    def data(self) -> bytes:
        """The encoded event."""
        return bytes((NOTIFICATION,)) + gob.encode(_NOTIFICATION, {"Type": self.kind, "Text": self.text})


_NOTIFICATION: Final = {65: gob.Type("AgentNotify", {"Type": gob.UINT, "Text": gob.STRING})}


class Sample(msgspec.Struct, frozen=True):
    """An undecoded event; decode() reads ``data``."""

    cpu: int
    data: bytes


class Lost(msgspec.Struct, frozen=True):
    """Events were lost before the next one."""

    count: int
    """Number of lost events."""
    cpu: int | None = None
    """The CPU with a full buffer; None if the subscriber's queue was full."""


Record = Drop | Trace | Verdict | TraceSock | RequestRecord | LookupRecord | AgentNotification | Raw
Event = Record | Lost


def decode(data: bytes) -> Record:
    """Decode a sample to a record; an invalid or unknown one becomes Raw.

    A drop of version 0, before Cilium 1.16, has the layout of version 1.
    """
    if data and (of_agent := _IN_GOB.get(data[0])) is not None:
        return of_agent(data)
    if data[:1] == bytes((TRACE_SOCK,)) and len(data) >= _trace_sock.size:
        return _read_trace_sock(data)
    size = _SIZES.get(data[0]) if data else None
    if size is None or len(data) < size:
        return Raw(data)
    kind, subtype, source, hash_, length, captured, version = _head.unpack_from(data)
    known = version == VERSION or (kind == DROP and version == 0)
    if not known or len(data) < size + captured:
        return Raw(data)
    packet = data[size : size + captured]  # the kernel pads samples to eight bytes
    if kind == VERDICT:
        return _read_verdict(data, source, hash_, length, packet)
    read = _read_drop if kind == DROP else _read_trace
    return read(data, source, hash_, subtype, length, packet)


def _read_request(data: bytes) -> RequestRecord | LookupRecord | Raw:
    try:
        record = gob.decode(data[1:]).get("LogRecord", {})
        return read_request(record) or read_lookup(record) or Raw(data)
    except ValueError:
        return Raw(data)


def _read_notification(data: bytes) -> AgentNotification | Raw:
    try:
        found = gob.decode(data[1:])
        return AgentNotification(found.get("Type", 0), found.get("Text", ""))
    except ValueError:
        return Raw(data)


def _read_trace_sock(data: bytes) -> TraceSock:
    _, point, address, port, cookie, cgroup, protocol, flags = _trace_sock.unpack_from(data)
    return TraceSock(
        point=point,
        address=IPv6Address(address) if flags & _IPV6 else IPv4Address(address[:4]),
        port=port,
        cookie=cookie,
        cgroup=cgroup,
        protocol=protocol,
    )


def _read_drop(data: bytes, source: int, hash_: int, reason: int, length: int, packet: bytes) -> Drop:
    from_, to, destination, line, file, ext_error, ifindex = _drop.unpack_from(data, _head.size)
    return Drop(
        source=source,
        hash=hash_,
        reason=reason,
        length=length,
        source_identity=from_,
        destination_identity=to,
        destination=destination,
        line=line,
        file=file,
        ext_error=ext_error,
        ifindex=ifindex,
        packet=packet,
    )


def _read_trace(data: bytes, source: int, hash_: int, point: int, length: int, packet: bytes) -> Trace:
    from_, to, destination, reason, flags, ifindex, original = _trace.unpack_from(data, _head.size)
    ipv6 = bool(flags & _IPV6)
    return Trace(
        source=source,
        hash=hash_,
        point=point,
        length=length,
        source_identity=from_,
        destination_identity=to,
        destination=destination,
        reason=reason & ~_ENCRYPTED,
        encrypted=bool(reason & _ENCRYPTED),
        ipv6=ipv6,
        ifindex=ifindex,
        original_ip=IPv6Address(original) if ipv6 else IPv4Address(original[:4]),
        packet=packet,
    )


def _read_verdict(data: bytes, source: int, hash_: int, length: int, packet: bytes) -> Verdict:
    remote, verdict, port, protocol, bits, auth = _verdict.unpack_from(data, _head.size)
    return Verdict(
        source=source,
        hash=hash_,
        length=length,
        remote_identity=remote,
        verdict=verdict,
        port=port,
        protocol=protocol,
        egress=bits & 3 == _OUTGOING,
        ipv6=bool(bits & 1 << 2),
        match=bits >> 3 & 7,
        audited=bool(bits & 1 << 6),
        auth=auth,
        packet=packet,
    )


_SIZES: Final = {
    DROP: _head.size + _drop.size,
    TRACE: _head.size + _trace.size,
    VERDICT: _head.size + _verdict.size,
}
_IN_GOB: Final = {REQUEST: _read_request, NOTIFICATION: _read_notification}
"""Decoders of events in gob, of the agent and its proxies."""
