"""An event as a line of text: what happened and why, from whom, to whom.

For:    those who show events to people. Needs: records, reasons. Gives: event_text(), EventNames.
"""

from typing import Protocol

from cells.observe.events.lookups import NAMES, LookupRecord
from cells.observe.events.packet import dissect, protocol_text
from cells.observe.events.parties import Party
from cells.observe.events.reasons import (
    MATCH_TYPES,
    OBSERVATION_POINTS,
    SOCKET_POINTS,
    SOCKET_PROTOCOLS,
    TRACE_REASONS,
    reason_name,
)
from cells.observe.events.records import Drop, Event, Lost, Raw, Trace, TraceSock, Verdict
from cells.observe.events.requests import RequestRecord


class EventNames(Protocol):
    """Names for what events have as numbers; empty texts for what has none."""

    def endpoint(self, number: int, /) -> str:
        """``namespace/name`` of an endpoint's pod."""
        ...

    def identity(self, number: int, /) -> str:
        """Labels of an identity."""
        ...

    def address(self, address: str, /) -> str:
        """The pod, service or node that has an address."""
        ...


class _Numbers:
    def endpoint(self, _number: int, /) -> str:
        return ""

    def identity(self, _number: int, /) -> str:
        return ""

    def address(self, _address: str, /) -> str:
        return ""


NUMBERS: EventNames = _Numbers()
"""Names of nothing."""


def event_text(event: Event, names: EventNames = NUMBERS) -> str:
    """One line, without its end."""
    match event:
        case Drop():
            return _drop_text(event, names)
        case Trace():
            return _trace_text(event, names)
        case Verdict():
            return _verdict_text(event, names)
        case TraceSock():
            return _trace_sock_text(event, names)
        case RequestRecord() | LookupRecord():
            return _l7_text(event, names)
        case Lost() | Raw():
            return _unread_text(event)


def _unread_text(event: Lost | Raw) -> str:
    if isinstance(event, Raw):
        return f"unknown event of {len(event.data)} bytes: {event.data.hex()}"
    slow = ": they are read too slowly" if event.cpu is None else f" on CPU {event.cpu}"
    return f"lost {event.count} events{slow}"


def _trace_sock_text(event: TraceSock, names: EventNames) -> str:
    point = SOCKET_POINTS.get(event.point, "unknown")
    protocol = SOCKET_PROTOCOLS.get(event.protocol, "unknown")
    end = _end(str(event.address), event.port, 0, 0, names)
    return f"socket, {point}: {end} {protocol}, cgroup {event.cgroup}, cookie {event.cookie}"


def _drop_text(drop: Drop, names: EventNames) -> str:
    reason = reason_name(drop.reason)
    if drop.ext_error:
        reason = f"{reason}, {drop.ext_error}"
    flow = _between(drop, names)
    place = f", file {drop.file} line {drop.line}" if drop.line else ""
    at = f", at {_endpoint(drop.source, names)}" if drop.source else ""
    return f"drop, {reason}: {flow}{at}, ifindex {drop.ifindex}{place}, flow {drop.hash:#x}"


def _trace_text(trace: Trace, names: EventNames) -> str:
    point = OBSERVATION_POINTS.get(trace.point, f"point {trace.point}")
    state = TRACE_REASONS.get(trace.reason, str(trace.reason))
    flow = _between(trace, names)
    encrypted = ", encrypted" if trace.encrypted else ""
    before = "" if trace.original_ip.is_unspecified else f", source was {trace.original_ip}"
    where = f", ifindex {trace.ifindex}" if trace.ifindex else ""
    return f"trace, {point}: {flow}, {state}{encrypted}{before}{where}, flow {trace.hash:#x}"


def _verdict_text(verdict: Verdict, names: EventNames) -> str:
    if verdict.verdict < 0:
        action = f"denied ({reason_name(-verdict.verdict)})"
        if verdict.audited:
            action = f"let pass by audit, else {action}"
    else:
        action = f"redirected to the proxy at port {verdict.verdict}" if verdict.verdict else "allowed"
    own, peer = (verdict.source, 0), (0, verdict.remote_identity)
    way, ends = ("egress", (own, peer)) if verdict.egress else ("ingress", (peer, own))
    match = MATCH_TYPES.get(verdict.match, str(verdict.match))
    flow = _flow(verdict.packet, *ends, names)
    return f"verdict, {way} of {_endpoint(verdict.source, names)} {action}: {flow}, match {match}"


def _l7_text(record: RequestRecord | LookupRecord, names: EventNames) -> str:
    kind = "response" if record.answer else "request"
    sender, receiver = record.source, record.destination
    if isinstance(record, RequestRecord) and record.answer:
        sender, receiver = receiver, sender  # the record has the client first, of answers too
    ends = f"from {_party(sender, names)} to {_party(receiver, names)}"
    if isinstance(record, RequestRecord):
        code = f" => {record.code}" if record.code else ""
        return f"http {kind}, {record.verdict}: {ends} {record.method} {record.url}{code}"
    asked = NAMES.get(record.type, f"TYPE{record.type}")
    text = f"dns {kind}, {record.verdict}: {ends} {record.query} {asked}"
    if record.answer:
        text += f" => {','.join(record.addresses) or f'no address (RCODE {record.code})'}, TTL {record.ttl}"
        text += f", CNAMEs {','.join(record.aliases)}" if record.aliases else ""
    return text


def _between(event: Drop | Trace, names: EventNames) -> str:
    sender = 0 if event.source == event.destination else event.source  # the receiver's own program reports
    source, destination = (sender, event.source_identity), (event.destination, event.destination_identity)
    return _flow(event.packet, source, destination, names)


def _flow(packet: bytes, source: tuple[int, int], destination: tuple[int, int], names: EventNames) -> str:
    """Both ends, of which endpoint and identity are given, 0 if not known, and what the packet is."""
    found = dissect(packet)
    ips = ("", "") if found is None else (found.source, found.destination)
    ports = (found and found.ports) or (None, None)
    sender, receiver = (
        _end(str(ip or ""), port, *end, names)
        for ip, port, end in zip(ips, ports, (source, destination), strict=True)
    )
    return f"from {sender} to {receiver} {protocol_text(packet)}"


def _party(party: Party, names: EventNames) -> str:
    labels = ", ".join(party.labels)
    return _end(party.address, party.port, party.endpoint, party.identity, names, labels)


def _end(ip: str, port: int | None, endpoint: int, identity: int, names: EventNames, labels: str = "") -> str:
    """Its name, address and identity, as far as they are known."""
    name = (names.address(ip) if ip else "") or (_endpoint(endpoint, names) if endpoint else "")
    address = ip if port is None or not ip else f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    known = names.identity(identity) or labels
    who = f"(identity {identity}{f' {known}' if known else ''})" if identity else ""
    return " ".join(filter(None, (name, address, who))) or "an unknown address"


def _endpoint(number: int, names: EventNames) -> str:
    return names.endpoint(number) or f"endpoint {number}"
