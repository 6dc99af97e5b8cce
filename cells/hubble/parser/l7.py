"""Parses access log records of the DNS proxy and Envoy to L7 flows; redacts requests as configured.

Source: Cilium 1.17, pkg/proxy/accesslog and pkg/hubble/parser/seven; W3C Trace Context; Go's net/url.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from cells.hubble.enums import FlowType, FlowVerdict, IPVersion, L7FlowType, TrafficDirection
from cells.hubble.flow import (
    DNS,
    HTTP,
    IP,
    SCTP,
    TCP,
    UDP,
    CiliumEventType,
    Flow,
    FlowEndpoint,
    HTTPHeader,
    Kafka,
    Layer4,
    Layer7,
    TraceContext,
    TraceParent,
)
from cells.hubble.parser import FlowOrigin, MalformedRecord, Stamp
from cells.hubble.parser.resolver import Resolver
from cells.hubble.scalars import DecodeError, parse_rfc3339
from cells.observe.events import LookupRecord, Party, RequestRecord

ACCESS_LOG: Final = 129
REDACTED: Final = "HUBBLE_REDACTED"
REQUESTS_REMEMBERED: Final = 10_000
"""Maximum number of requests without a response with stored times, for latencies."""

V = TypeVar("V")


class RequestParty(msgspec.Struct, frozen=True):
    """Source or destination of a request."""

    address: str
    port: int = 0
    endpoint: int = 0
    identity: int = 0
    labels: Sequence[str] = ()


class DNSRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A DNS query or response."""

    query: str = ""
    addresses: Sequence[str] = ()
    ttl: int = 0
    aliases: Sequence[str] = ()
    observation_source: str = ""
    code: int = 0
    types: Sequence[int] = ()
    answer_types: Sequence[int] = ()


class HTTPRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request or response."""

    code: int = 0
    method: str = ""
    url: str = ""
    protocol: str = ""
    headers: Mapping[str, Sequence[str]] = {}


class KafkaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Kafka request or response."""

    error_code: int = 0
    api_version: int = 0
    api_key: str = ""
    correlation_id: int = 0
    topic: str = ""


class OtherRecord(msgspec.Struct, frozen=True):
    """A request or response of a protocol for which flows have no message."""

    protocol: str
    fields: Mapping[str, str] = {}


class AccessLogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The access log record of one request or response."""

    type: str
    """Request, Response or Sample."""
    time: str
    """RFC 3339."""
    observation_point: str = ""
    """Ingress or Egress."""
    source: RequestParty
    destination: RequestParty
    ip_version: int
    """4 or 6."""
    verdict: str = ""
    """Forwarded, Denied, Redirected or Error."""
    transport_protocol: int = 0
    dns: DNSRecord | None = None
    http: HTTPRecord | None = None
    kafka: KafkaRecord | None = None
    other: OtherRecord | None = None


class Redaction(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of hubble-redact-*: which parts of requests are hidden."""

    enabled: bool = False
    url_query: bool = False
    user_info: bool = True
    """Passwords in URLs; effective also if `enabled` is false."""
    kafka_api_key: bool = False
    headers_allow: frozenset[str] = frozenset()
    """Names in lower case."""
    headers_deny: frozenset[str] = frozenset()

    def hides_header(self, name: str) -> bool:
        """Whether the value of the header is redacted."""
        if not self.enabled:
            return False
        name = name.lower()
        if name in self.headers_allow:
            return False
        return name in self.headers_deny or bool(self.headers_allow) or not self.headers_deny


class _Remembered(Generic[V]):
    """A bounded map of values by request ID; the oldest are evicted."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, V] = OrderedDict()

    def add(self, request_id: str, value: V) -> None:
        self._values[request_id] = value
        self._values.move_to_end(request_id)
        if len(self._values) > REQUESTS_REMEMBERED:
            self._values.popitem(last=False)

    def take(self, request_id: str) -> V | None:
        return self._values.pop(request_id, None)


class L7Parser:
    """Parses access log records in order: a response's latency is the time since its request."""

    def __init__(self, origin: FlowOrigin, redaction: Redaction) -> None:
        self._origin = origin
        self._redaction = redaction
        self._times: _Remembered[int] = _Remembered()
        self._traces: _Remembered[TraceContext] = _Remembered()

    def read(self, record: AccessLogRecord, stamp: Stamp, resolver: Resolver) -> Flow:
        """Parse a record to a flow. Raises MalformedRecord without a time or address family."""
        try:
            time = parse_rfc3339(record.time)
        except DecodeError as error:
            raise MalformedRecord(str(error)) from None
        if record.ip_version not in {4, 6}:
            raise MalformedRecord(f"IP version {record.ip_version}")
        source, destination = record.source, record.destination
        kind = _TYPES.get(record.type, L7FlowType.UNKNOWN_L7_TYPE)
        reply = kind == L7FlowType.RESPONSE
        latency = self._latency(record, kind, time)
        l4 = _l4(record)
        ports = (source.port, destination.port) if l4 is not None else (0, 0)
        l7 = self._l7(record, kind, latency)
        return Flow(
            time=stamp.time,
            uuid=stamp.uuid,
            verdict=_VERDICTS.get(record.verdict, FlowVerdict.VERDICT_UNKNOWN),
            IP=IP(
                source=source.address,
                destination=destination.address,
                ipVersion=IPVersion.IPv4 if record.ip_version == 4 else IPVersion.IPv6,
            ),
            l4=l4,
            source=_endpoint(source, resolver),
            destination=_endpoint(destination, resolver),
            Type=FlowType.L7,
            node_name=self._origin.node_name,
            node_labels=self._origin.node_labels,
            source_names=resolver.names_at(destination.endpoint, source.address),
            destination_names=resolver.names_at(source.endpoint, destination.address),
            l7=l7,
            is_reply=reply,
            reply=reply,
            event_type=CiliumEventType(type=ACCESS_LOG),
            source_service=resolver.service_at(source.address, ports[0]),
            destination_service=resolver.service_at(destination.address, ports[1]),
            traffic_direction=_DIRECTIONS.get(record.observation_point, 0),
            trace_context=self._trace(record, kind),
            Summary=_summary(record, kind, l7, latency),
        )

    def _latency(self, record: AccessLogRecord, kind: L7FlowType, time: int) -> int:
        """Return the time since the request in ns; 0 for a request, or if its time is unknown."""
        if not (request_id := _header(record, "X-Request-Id")):
            return 0
        if kind == L7FlowType.REQUEST:
            self._times.add(request_id, time)
        elif kind == L7FlowType.RESPONSE and (begin := self._times.take(request_id)) is not None:
            return max(0, time - begin)
        return 0

    def _trace(self, record: AccessLogRecord, kind: L7FlowType) -> TraceContext | None:
        request_id = _header(record, "X-Request-Id")
        if kind == L7FlowType.RESPONSE:
            return self._traces.take(request_id) if request_id else None
        if kind != L7FlowType.REQUEST or not (trace_id := _trace_id(_header(record, "Traceparent"))):
            return None
        context = TraceContext(parent=TraceParent(trace_id=trace_id))
        if request_id:
            self._traces.add(request_id, context)
        return context

    def _l7(self, record: AccessLogRecord, kind: L7FlowType, latency: int) -> Layer7:
        layer = Layer7(type=kind, latency_ns=latency)
        answer = kind != L7FlowType.REQUEST
        if (dns := record.dns) is not None:
            layer.dns = _dns(dns, answer=answer)
        elif (http := record.http) is not None:
            layer.http = self._http(http, answer=answer)
        elif (kafka := record.kafka) is not None:
            layer.kafka = self._kafka(kafka, answer=answer)
        return layer

    def redacted(self, record: RequestRecord) -> RequestRecord:
        """Return a request record without the redacted parts."""
        hides = self._redaction.hides_header
        headers = {
            name: [REDACTED] * len(values) if hides(name) else values
            for name, values in record.headers.items()
        }
        return replace(record, url=_url(record.url, self._redaction), headers=headers)

    def _http(self, record: HTTPRecord, *, answer: bool) -> HTTP:
        hides = self._redaction.hides_header
        return HTTP(
            code=record.code if answer else 0,
            method=record.method,
            url=_url(record.url, self._redaction),
            protocol=record.protocol,
            headers=tuple(
                HTTPHeader(key=name, value=REDACTED if hides(name) else value)
                for name, values in sorted(record.headers.items())
                for value in values
            ),
        )

    def _kafka(self, record: KafkaRecord, *, answer: bool) -> Kafka:
        hidden = self._redaction.enabled and self._redaction.kafka_api_key
        return Kafka(
            error_code=record.error_code if answer else 0,
            api_version=record.api_version,
            api_key=REDACTED if hidden else record.api_key,
            correlation_id=record.correlation_id,
            topic=record.topic,
        )


_TYPES: Final = {
    "Request": L7FlowType.REQUEST,
    "Response": L7FlowType.RESPONSE,
    "Sample": L7FlowType.SAMPLE,
}
_VERDICTS: Final = {
    "Forwarded": FlowVerdict.FORWARDED,
    "Denied": FlowVerdict.DROPPED,
    "Redirected": FlowVerdict.REDIRECTED,
    "Error": FlowVerdict.ERROR,
}
_DIRECTIONS: Final = {"Ingress": TrafficDirection.INGRESS, "Egress": TrafficDirection.EGRESS}
_FIRST_TYPES = "A NS MD MF CNAME SOA MB MG MR NULL WKS PTR HINFO MINFO MX TXT"
DNS_TYPES: Final = dict(enumerate(_FIRST_TYPES.split(), 1)) | {28: "AAAA", 33: "SRV", 41: "OPT", 256: "URI"}
"""Names of DNS record types; all others are ``Unknown``."""
DNS_CODES: Final = {
    0: "No Error",
    1: "Format Error",
    2: "Server Failure ",
    3: "Non-Existent Domain",
    4: "Not Implemented",
    5: "Query Refused",
    6: "Name Exists when it should not",
    7: "RR Set Exists when it should not",
    8: "RR Set that should exist does not",
    9: "Server Not Authoritative for zone",
    10: "Name not contained in zone",
    16: "Bad OPT Version",
    17: "Key not recognized",
    18: "Signature out of time window",
    19: "Bad TKEY Mode",
    20: "Duplicate key name",
    21: "Algorithm not supported",
    22: "Bad Truncation",
    23: "Bad Cookie",
}
"""Names of DNS response codes; all others are ``Unknown``."""


def _l4(record: AccessLogRecord) -> Layer4 | None:
    source, destination = record.source.port, record.destination.port
    match record.transport_protocol & 0xFF:
        case 6:
            return Layer4(TCP=TCP(source_port=source, destination_port=destination))
        case 17:
            return Layer4(UDP=UDP(source_port=source, destination_port=destination))
        case 132:
            return Layer4(SCTP=SCTP(source_port=source, destination_port=destination))
    return None


def _endpoint(party: RequestParty, resolver: Resolver) -> FlowEndpoint:
    namespace, pod_name = resolver.pod_at(party.address)
    local = resolver.local_endpoint(party.address)
    workload = local.workload if local is not None else None
    return FlowEndpoint(
        ID=party.endpoint,
        identity=party.identity,
        namespace=namespace,
        pod_name=pod_name,
        labels=tuple(sorted(party.labels)),
        workloads=(workload,) if workload is not None else (),
    )


def _dns(record: DNSRecord, *, answer: bool) -> DNS:
    dns = DNS(
        query=record.query,
        observation_source=record.observation_source,
        qtypes=tuple(DNS_TYPES.get(number, "Unknown") for number in record.types),
    )
    if answer:
        dns.ips = tuple(record.addresses)
        dns.ttl = record.ttl
        dns.cnames = tuple(record.aliases)
        dns.rcode = record.code
        dns.rrtypes = tuple(DNS_TYPES.get(number, "Unknown") for number in record.answer_types)
    return dns


def _header(record: AccessLogRecord, name: str) -> str:
    """Return the first value of a header, by its canonical name."""
    values = record.http.headers.get(name) if record.http is not None else None
    return values[0] if values else ""


_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def _trace_id(header: str) -> str:
    """Return the trace ID of a traceparent header; empty if the header is invalid."""
    if (match := _TRACEPARENT.fullmatch(header.strip())) is None:
        return ""
    version, trace_id, parent, _, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not parent.strip("0"):
        return ""
    return trace_id


# --- summaries ---


def _summary(record: AccessLogRecord, kind: L7FlowType, l7: Layer7, latency: int) -> str:
    if record.http is not None:
        url = l7.http.url if l7.http is not None else record.http.url
        return _http_summary(record.http, kind, url, latency)
    if (kafka := l7.kafka) is not None:
        text = f"{kafka.api_key} correlation id {kafka.correlation_id} topic '{kafka.topic}'"
        if kind == L7FlowType.REQUEST:
            return f"Kafka request {text}"
        return f"Kafka response {text} return code {kafka.error_code}"
    if l7.dns is not None:
        return _dns_summary(l7.dns, kind)
    if (other := record.other) is not None:
        fields = " ".join(f"{name}:{value}" for name, value in sorted(other.fields.items()))
        return f"{other.protocol} Fields: map[{fields}]"
    return ""


def _http_summary(http: HTTPRecord, kind: L7FlowType, url: str, latency: int) -> str:
    if kind == L7FlowType.REQUEST:
        return f"{http.protocol} {http.method} {url}"
    if kind == L7FlowType.RESPONSE:
        return f"{http.protocol} {http.code} {latency // 1_000_000}ms ({http.method} {url})"
    return ""


def _dns_summary(dns: DNS, kind: L7FlowType) -> str:
    types = ",".join(dns.qtypes)
    if kind == L7FlowType.REQUEST:
        return f"DNS Query {dns.query} {types}"
    if kind != L7FlowType.RESPONSE:
        return ""
    if dns.rcode:
        answer = f"RCode: {DNS_CODES.get(dns.rcode, 'Unknown')}"
    else:
        parts = [f'"{",".join(dns.ips)}"'] if dns.ips else []
        if dns.cnames:
            parts.append(f'CNAMEs: "{",".join(dns.cnames)}"')
        answer = " ".join(parts)
    origin = "Proxy" if dns.observation_source == "proxy" else "Query"
    return f"DNS Answer {answer} TTL: {dns.ttl} ({origin} {dns.query} {types})"


# --- URLs ---

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)?(//[^/?#]*)?([^?#]*)(\?[^#]*)?(#.*)?", re.DOTALL)
_ESCAPED: Final = re.compile(rb"(?:[A-Za-z0-9\-_.~!$&'()*+,;=:@\[\]/]|%[0-9A-Fa-f]{2})*")
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~$&+,/:;=@")


def _url(text: str, redaction: Redaction) -> str:
    """Format a parsed URL as Go's URL.String() does, without redacted parts."""
    match = _URL.fullmatch(text)
    if match is None:
        return text
    scheme, authority, path, query, fragment = (part or "" for part in match.groups())
    if redaction.enabled and redaction.url_query:
        query = fragment = ""
    if redaction.user_info:
        authority = re.sub(r"^(//[^:@]*:)[^@]*(?=@)", rf"\g<1>{REDACTED}", authority)
    opaque = scheme and not authority and not path.startswith("/")
    return scheme + authority + (path if opaque else _path(path)) + query + fragment


def _path(text: str) -> str:
    """Return the path unchanged if its escapes are valid, else decode and escape it again."""
    data = text.encode()
    if text == "*" or _ESCAPED.fullmatch(data):
        return text
    plain = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes((int(found[1], 16),)), data)
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in plain)


# --- records of this agent's proxies ---


def access_log_record(record: RequestRecord | LookupRecord) -> AccessLogRecord:
    """Convert a report of the DNS proxy or Envoy to an access log record."""
    http, dns = None, None
    if isinstance(record, RequestRecord):
        http = HTTPRecord(
            code=record.code,
            method=record.method,
            url=record.url,
            protocol=record.protocol,
            headers=record.headers,
        )
    else:
        dns = DNSRecord(
            query=record.query,
            addresses=record.addresses,
            ttl=record.ttl,
            aliases=record.aliases,
            observation_source="proxy",
            code=record.code,
            types=(record.type,),
            answer_types=record.answer_types,
        )
    return AccessLogRecord(
        type="Response" if record.answer else "Request",
        time=record.time,
        observation_point="Ingress" if isinstance(record, RequestRecord) and record.ingress else "Egress",
        source=_party(record.source),
        destination=_party(record.destination),
        ip_version=6 if ":" in record.source.address else 4,
        verdict=record.verdict,
        transport_protocol=6 if isinstance(record, RequestRecord) else record.protocol,
        http=http,
        dns=dns,
    )


def _party(party: Party) -> RequestParty:
    return RequestParty(party.address, party.port, party.endpoint, party.identity, party.labels)
