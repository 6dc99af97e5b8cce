"""Parses datapath records (perf events) to flows or debug events, with names from a Resolver.

`Parser.read` raises an `EventError` for a record that does not become an event; its class is the reason.

Source: Cilium 1.17, bpf/lib/{drop,trace,trace_sock,policy_log,dbg}.h; pkg/hubble/parser (threefour, sock,
debug).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.hubble.codec import share
from cells.hubble.enums import (
    DropReason,
    FlowType,
    FlowVerdict,
    IPVersion,
    TraceObservationPoint,
    TraceReason,
    TrafficDirection,
)
from cells.hubble.flow import (
    IP,
    TCP,
    UDP,
    CiliumEventType,
    DebugEvent,
    Flow,
    FlowEndpoint,
    FlowPolicy,
    FlowService,
    Layer4,
    NetworkInterface,
)
from cells.hubble.parser.node_events import debug_text
from cells.hubble.parser.packet import Headers, PacketError, ip_text, read_packet
from cells.hubble.parser.resolver import EntryKey, Resolver, policies_of

DROP, DEBUG, CAPTURE, TRACE, VERDICT, TRACE_SOCK = 1, 2, 3, 4, 5, 7

_drop = struct.Struct("<xBHIIIIIIHBbI")
_debug = struct.Struct("<xBHIIII")
_capture = struct.Struct("<xBHIIIII")
_trace = struct.Struct("<xBHIIHHIIHBBI")
_policy_verdict = struct.Struct("<xBHIIHHIiHBBB3x")
_trace_sock = struct.Struct("<xB16sHQQBB")
_TRACE_V1: Final = _trace.size + 16

_INGRESS, _EGRESS = TrafficDirection.INGRESS, TrafficDirection.EGRESS
_UNKNOWN_REASONS: Final = frozenset({5, 6, 7, 8})
_ENCRYPT_OVERLAY = 8
_FORWARDING: Final = frozenset({FlowVerdict.FORWARDED, FlowVerdict.REDIRECTED})
_WITH_INTERFACE: Final = frozenset({4, 5, 6, 7, 10, 11})
_WITH_PROXY_PORT: Final = frozenset({8, 9})
_L3_ONLY, _L3_L4, _L4_ONLY, _ALL, _PROTO_ONLY = 1, 2, 3, 4, 6
_TO_PROXY: Final = 1


class EventError(ValueError):
    """Raised for a record that does not become an event."""


class EmptyRecord(EventError):  # noqa: N818 - reads as what it is
    """The record is empty."""


class UnknownRecord(EventError):  # noqa: N818
    """The message type has no event in Hubble."""


class SkippedRecord(EventError):  # noqa: N818
    """The settings exclude the record."""


class MalformedRecord(EventError):  # noqa: N818
    """The record is too short, of an unknown version, or has a malformed packet."""


class FlowOrigin(msgspec.Struct):
    """The fields that all flows of this node share."""

    node_name: str
    """``cluster/node``; the node alone in the cluster ``default``."""
    node_labels: tuple[str, ...] = ()
    """``key=value``, sorted, from the Node object."""


class Stamp(msgspec.Struct, frozen=True):
    """Time and UUID of an event."""

    time: int
    """Nanoseconds since 1970."""
    uuid: str


class Parser:
    """Parses datapath records by their message type (first byte)."""

    def __init__(self, origin: FlowOrigin, *, skip_unknown_cgroup_ids: bool = True) -> None:
        self._origin = origin
        self._skip_unknown_cgroup_ids = skip_unknown_cgroup_ids
        self._readers: dict[int, Callable[[bytes, int, Stamp, Resolver], Flow | DebugEvent]] = {
            DROP: self._drop,
            DEBUG: _debug_event,
            CAPTURE: self._capture,
            TRACE: self._trace,
            VERDICT: self._policy_verdict,
            TRACE_SOCK: self._trace_sock,
        }

    def read(self, data: bytes, cpu: int, stamp: Stamp, resolver: Resolver) -> Flow | DebugEvent:
        """Parse a record to an event. Raises EventError if it does not become one."""
        if not data:
            raise EmptyRecord("empty record")
        reader = self._readers.get(data[0])
        if reader is None:
            raise UnknownRecord(f"unknown record type {data[0]}")
        try:
            return reader(data, cpu, stamp, resolver)
        except struct.error:
            raise MalformedRecord(f"record of type {data[0]} has only {len(data)} bytes") from None
        except PacketError as error:
            raise MalformedRecord(str(error)) from None

    def _flow(
        self,
        stamp: Stamp,
        headers: Headers,
        source: FlowEndpoint,
        destination: FlowEndpoint,
        resolver: Resolver,
    ) -> Flow:
        """Create a flow with the fields that all L3/L4 flows share."""
        flow = Flow(
            time=stamp.time,
            uuid=stamp.uuid,
            ethernet=headers.ethernet,
            l4=headers.l4,
            source=source,
            destination=destination,
            Type=FlowType.L3_L4,
            node_name=self._origin.node_name,
            node_labels=self._origin.node_labels,
            Summary=headers.summary,
        )
        if (ip := headers.ip) is not None:
            flow.IP = ip
            flow.source_names = resolver.names_at(destination.ID, ip.source)
            flow.destination_names = resolver.names_at(source.ID, ip.destination)
            flow.source_service = resolver.service_at(ip.source, headers.source_port)
            flow.destination_service = resolver.service_at(ip.destination, headers.destination_port)
        return flow

    def _drop(self, data: bytes, _cpu: int, stamp: Stamp, resolver: Resolver) -> Flow:
        reason, endpoint, _, _, _, from_, to, *_ = _drop.unpack_from(data)
        headers = read_packet(data[_drop.size :])
        source, destination = _endpoints(headers, from_, to, resolver)
        flow = self._flow(stamp, headers, source, destination, resolver)
        flow.verdict = FlowVerdict.DROPPED
        flow.drop_reason = flow.drop_reason_desc = reason
        flow.event_type = _event_type(DROP, reason)
        if endpoint:
            flow.traffic_direction = _EGRESS if endpoint == source.ID else _INGRESS
        return flow

    def _capture(self, data: bytes, _cpu: int, stamp: Stamp, resolver: Resolver) -> Flow:
        point, _, _, _, _, argument, _ = _capture.unpack_from(data)
        headers = read_packet(data[_capture.size :])
        source, destination = _endpoints(headers, 0, 0, resolver)
        flow = self._flow(stamp, headers, source, destination, resolver)
        flow.event_type = _event_type(CAPTURE, point)
        flow.debug_capture_point = point
        if point in _WITH_INTERFACE and argument:
            flow.interface = _interface(argument, resolver.link_name(argument))
        if point in _WITH_PROXY_PORT:
            flow.proxy_port = int.from_bytes(argument.to_bytes(4, "little"), "big")
        return flow

    def _trace(self, data: bytes, _cpu: int, stamp: Stamp, resolver: Resolver) -> Flow:
        point, endpoint, _, _, _, version, from_, to, to_endpoint, reason, flags, ifindex = (
            _trace.unpack_from(data)
        )
        if version > 1:
            raise MalformedRecord(f"trace of unknown version {version}")
        if version and len(data) < _TRACE_V1:
            raise MalformedRecord(f"trace has only {len(data)} bytes")
        headers = read_packet(data[_TRACE_V1 if version else _trace.size :])
        original = data[_trace.size : _trace.size + (16 if flags & 1 else 4)] if version else b""
        translated = _restore_original_source(headers, original)
        source, destination = _endpoints(headers, from_, to, resolver)
        flow = self._flow(stamp, headers, source, destination, resolver)
        flow.verdict = FlowVerdict.FORWARDED
        encrypted, reason = reason & 0x80, reason & 0x7F
        if encrypted and flow.IP is not None:
            flow.IP = replace(flow.IP, encrypted=True)
        flow.event_type = _event_type(TRACE, point)
        flow.trace_observation_point = point or TraceObservationPoint.TO_ENDPOINT
        flow.trace_reason = reason + 1 if reason < 5 else 0 if reason == 5 else reason
        reply = flow.trace_reason == TraceReason.REPLY
        if reason not in _UNKNOWN_REASONS:
            flow.is_reply = flow.reply = reply
        if ifindex:
            flow.interface = _interface(ifindex, resolver.link_name(ifindex))
        if point == _TO_PROXY:
            flow.proxy_port = to_endpoint
        if endpoint and flow.trace_reason:
            outgoing = reason == _ENCRYPT_OVERLAY or (endpoint == source.ID) != reply or translated
            flow.traffic_direction = _EGRESS if outgoing else _INGRESS
        return flow

    def _policy_verdict(self, data: bytes, _cpu: int, stamp: Stamp, resolver: Resolver) -> Flow:
        sub_type, _, _, _, _, _, remote, verdict, _, _, flags, auth = _policy_verdict.unpack_from(data)
        ingress, match = flags & 3 == 1, flags >> 3 & 7
        headers = read_packet(data[_policy_verdict.size :])
        source, destination = _endpoints(
            headers, remote if ingress else 0, 0 if ingress else remote, resolver
        )
        flow = self._flow(stamp, headers, source, destination, resolver)
        flow.event_type = _event_type(VERDICT, sub_type)
        flow.auth_type = auth
        flow.policy_match_type = match
        flow.traffic_direction = _INGRESS if ingress else _EGRESS
        if verdict < 0:
            flow.verdict = FlowVerdict.DROPPED
            flow.drop_reason = flow.drop_reason_desc = -verdict
        else:
            flow.is_reply = False
            allowed = FlowVerdict.AUDIT if flags & 0x40 else FlowVerdict.FORWARDED
            flow.verdict = FlowVerdict.REDIRECTED if verdict else allowed
        _correlate_policy(flow, headers, match, remote, resolver)
        return flow

    def _trace_sock(self, data: bytes, _cpu: int, stamp: Stamp, resolver: Resolver) -> Flow:
        point, packed, port, cookie, cgroup, protocol, flags = _trace_sock.unpack_from(data)
        ipv6 = bool(flags & 1)
        pod = _first_of_family(resolver.addresses_of_cgroup(cgroup), ipv6=ipv6)
        if not pod and self._skip_unknown_cgroup_ids:
            raise SkippedRecord(f"no pod has the cgroup {cgroup}")
        source, destination = (pod, 0), (ip_text(packed if ipv6 else packed[:4]), port)
        if point in {3, 4}:  # reverse translation: the packet is a reply
            source, destination = destination, source
        l4, name = None, "Unknown"
        if protocol == 1:
            l4, name = Layer4(TCP=TCP(source_port=source[1], destination_port=destination[1])), "TCP"
        elif protocol == 2:
            l4, name = Layer4(UDP=UDP(source_port=source[1], destination_port=destination[1])), "UDP"
        client, server = resolver.party(source[0], 0), resolver.party(destination[0], 0)
        return Flow(
            time=stamp.time,
            uuid=stamp.uuid,
            verdict=_SOCK_VERDICTS.get(point, 0),
            IP=IP(
                source=source[0],
                destination=destination[0],
                ipVersion=IPVersion.IPv6 if ipv6 else IPVersion.IPv4,
            ),
            l4=l4,
            source=client,
            destination=server,
            Type=FlowType.SOCK,
            node_name=self._origin.node_name,
            node_labels=self._origin.node_labels,
            source_names=resolver.names_at(server.ID, source[0]) if source[0] else (),
            destination_names=resolver.names_at(client.ID, destination[0]) if destination[0] else (),
            event_type=_event_type(TRACE_SOCK, point),
            source_service=_service(source, resolver),
            destination_service=_service(destination, resolver),
            sock_xlate_point=point,
            socket_cookie=cookie,
            cgroup_id=cgroup,
            Summary=name,
        )


_SOCK_VERDICTS: Final = {
    1: FlowVerdict.TRACED,
    2: FlowVerdict.TRANSLATED,
    3: FlowVerdict.TRACED,
    4: FlowVerdict.TRANSLATED,
}


@lru_cache(maxsize=1024)
def _event_type(kind: int, sub: int) -> CiliumEventType:
    return share(CiliumEventType(type=kind, sub_type=sub))


@lru_cache(maxsize=1024)
def _interface(index: int, name: str) -> NetworkInterface:
    return share(NetworkInterface(index=index, name=name))


def _service(address_port: tuple[str, int], resolver: Resolver) -> FlowService | None:
    return resolver.service_at(*address_port) if address_port[0] else None


def _first_of_family(addresses: Sequence[str], *, ipv6: bool) -> str:
    return next((address for address in addresses if (":" in address) == ipv6), "")


def _endpoints(
    headers: Headers, from_: int, to: int, resolver: Resolver
) -> tuple[FlowEndpoint, FlowEndpoint]:
    if (ip := headers.ip) is None:
        return resolver.party("", from_), resolver.party("", to)
    return resolver.party(ip.source, from_), resolver.party(ip.destination, to)


def _restore_original_source(headers: Headers, original: bytes) -> bool:
    """Set the source address before SNAT if the record has one. Return whether it has."""
    if not any(original):
        return False
    if (ip := headers.ip) is not None and (source := ip_text(original)) != ip.source:
        headers.ip = replace(ip, source=source, source_xlated=ip.source)
    return True


def _correlate_policy(flow: Flow, headers: Headers, match: int, remote: int, resolver: Resolver) -> None:
    """Set the policies that allowed or denied the flow, if the policy map still has the entry.

    Source: Cilium 1.17, CorrelatePolicy.
    """
    allowed = flow.verdict in _FORWARDING
    if not allowed and flow.drop_reason_desc != DropReason.POLICY_DENY:
        return
    port = headers.destination_port
    if (l4 := headers.l4) is not None and (icmp := l4.ICMPv4 or l4.ICMPv6) is not None:
        port = icmp.type
    key = _entry_key(match, remote, port, headers.protocol)
    if not port or key is None:
        return
    ingress = flow.traffic_direction == _INGRESS
    local = flow.destination if ingress else flow.source
    address = (headers.ip.source if ingress else headers.ip.destination) if headers.ip is not None else ""
    rules = local and resolver.rules(local.ID, key, address, egress=not ingress)
    if not rules:
        return
    policies: tuple[FlowPolicy, ...] = policies_of(rules)
    if ingress and allowed:
        flow.ingress_allowed_by = policies
    elif ingress:
        flow.ingress_denied_by = policies
    elif allowed:
        flow.egress_allowed_by = policies
    else:
        flow.egress_denied_by = policies


def _entry_key(match: int, remote: int, port: int, protocol: int) -> EntryKey | None:
    """Return the key of the matched policy map entry; None for other match types."""
    key_fields = {
        _L3_L4: (remote, port, protocol),
        _L4_ONLY: (0, port, protocol),
        _PROTO_ONLY: (0, None, protocol),
        _L3_ONLY: (remote, None, 0),
        _ALL: (0, None, 0),
    }.get(match)
    return EntryKey(*key_fields) if key_fields is not None else None


def _debug_event(data: bytes, cpu: int, _stamp: Stamp, resolver: Resolver) -> DebugEvent:
    kind, number, hash_, *arguments = _debug.unpack_from(data)
    source = None
    if number:
        local = resolver.endpoint(number)
        source = FlowEndpoint(ID=number)
        if local is not None:
            source = FlowEndpoint(
                ID=number,
                identity=local.identity,
                namespace=local.namespace,
                pod_name=local.pod_name,
                labels=local.labels,
            )
    return DebugEvent(
        type=kind,
        source=source,
        hash=hash_,
        arg1=arguments[0],
        arg2=arguments[1],
        arg3=arguments[2],
        message=debug_text(kind, *arguments),
        cpu=cpu,
    )
