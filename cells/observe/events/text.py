"""An event as a line of text.

For:    those who show events to people. Needs: records, reasons. Gives: event_text().
The wording follows that of ``cilium-dbg monitor``.
"""

from cells.observe.events.lookups import LookupRecord, lookup_text
from cells.observe.events.packet import packet_text
from cells.observe.events.reasons import (
    MATCH_TYPES,
    OBSERVATION_POINTS,
    SOCKET_POINTS,
    SOCKET_PROTOCOLS,
    TRACE_REASONS,
    reason_name,
)
from cells.observe.events.records import Drop, Event, Lost, Raw, Trace, TraceSock, Verdict
from cells.observe.events.requests import RequestRecord, request_text


def event_text(event: Event) -> str:
    """One line, without its end."""
    match event:
        case Drop():
            return _drop_text(event)
        case Trace():
            return _trace_text(event)
        case Verdict():
            return _verdict_text(event)
        case TraceSock():
            return _trace_sock_text(event)
        case RequestRecord() | LookupRecord():
            return request_text(event) if isinstance(event, RequestRecord) else lookup_text(event)
        case Lost() | Raw():
            return _unread_text(event)


def _unread_text(event: Lost | Raw) -> str:
    if isinstance(event, Raw):
        return f"unknown event of {len(event.data)} bytes: {event.data.hex()}"
    slow = ": they are read too slowly" if event.cpu is None else f" on CPU {event.cpu}"
    return f"lost {event.count} events{slow}"


def _trace_sock_text(event: TraceSock) -> str:
    point = SOCKET_POINTS.get(event.point, "unknown")
    protocol = SOCKET_PROTOCOLS.get(event.protocol, "unknown")
    return (
        f"[{point}] cgroup_id: {event.cgroup} sock_cookie: {event.cookie},"
        f" dst [{event.address}]:{event.port} {protocol}"
    )


def _drop_text(drop: Drop) -> str:
    reason = reason_name(drop.reason)
    if drop.ext_error:
        reason = f"{reason}, {drop.ext_error}"
    place = f", file {drop.file} line {drop.line}" if drop.line else ""
    return (
        f"xx drop ({reason}) flow {drop.hash:#x} from endpoint {drop.source} to endpoint {drop.destination},"
        f" ifindex {drop.ifindex}{place}, identity {_identities(drop)}: {packet_text(drop.packet)}"
    )


def _trace_text(trace: Trace) -> str:
    point = OBSERVATION_POINTS.get(trace.point, f"point {trace.point}")
    arrow = "<-" if point.startswith("from-") else "->"
    state = TRACE_REASONS.get(trace.reason, str(trace.reason))
    where = f"{point} {trace.destination}" if trace.point == 0 else point
    encrypted = " encrypted" if trace.encrypted else ""
    return (
        f"{arrow} {where} flow {trace.hash:#x}, identity {_identities(trace)} state {state}{encrypted}"
        f" ifindex {trace.ifindex} orig-ip {trace.original_ip}: {packet_text(trace.packet)}"
    )


def _verdict_text(verdict: Verdict) -> str:
    if verdict.verdict < 0:
        action = f"deny ({reason_name(-verdict.verdict)})"
    else:
        action = f"redirect to port {verdict.verdict}" if verdict.verdict else "allow"
    if verdict.audited:
        action = "audit"
    way = "egress" if verdict.egress else "ingress"
    match = MATCH_TYPES.get(verdict.match, str(verdict.match))
    return (
        f"Policy verdict log: flow {verdict.hash:#x} local EP ID {verdict.source},"
        f" remote ID {verdict.remote_identity}, proto {verdict.protocol}, {way}, action {action},"
        f" match {match}, {packet_text(verdict.packet)}"
    )


def _identities(event: Drop | Trace) -> str:
    return f"{event.source_identity}->{event.destination_identity}"
