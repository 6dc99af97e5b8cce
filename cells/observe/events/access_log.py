"""Access log records of proxies: HTTP requests and DNS lookups, with their encoding in gob.

The proxies create records, monitor and Hubble decode them. Source: Cilium 1.17, pkg/proxy/accesslog. Labels
are a ``labels.LabelArray``, as in 1.17; earlier versions had strings.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Final

import msgspec

from cells.base.labels import Label, parse
from cells.observe.events import gob
from cells.observe.events.gob import BYTES, INT, STRING, UINT, Type

NODE, ENDPOINT, LABELS, LABEL = range(100, 104)
TYPES: Final = {
    NODE: Type("NodeAddressInfo", {"IPv4": STRING, "IPv6": STRING}),
    ENDPOINT: Type(
        "EndpointInfo",
        {"ID": UINT, "IPv4": STRING, "IPv6": STRING, "Port": UINT, "Identity": UINT, "Labels": LABELS},
    ),
    LABELS: Type("LabelArray", of=LABEL),
    LABEL: Type("Label", {"Key": STRING, "Value": STRING, "Source": STRING}),
}
"""Types of a record's endpoints, by numbers that the record's own types do not use."""
RECORD: Final = {
    "Type": STRING,
    "Timestamp": STRING,
    "NodeAddressInfo": NODE,
    "ObservationPoint": STRING,
    "SourceEndpoint": ENDPOINT,
    "DestinationEndpoint": ENDPOINT,
    "IPVersion": UINT,
    "Verdict": STRING,
    "TransportProtocol": UINT,
}
"""Fields of a ``LogRecord``, before the field of the protocol."""


class Party(msgspec.Struct, frozen=True):
    """The client or the server of a record."""

    address: str
    port: int
    identity: int
    endpoint: int = 0
    """0 if it is not an endpoint of this node."""
    labels: tuple[str, ...] = ()
    """Labels of the identity, sorted; empty if unknown."""


def party_value(party: Party) -> dict[str, Any]:
    """Return a party as EndpointInfo, to encode."""
    family = "IPv6" if ":" in party.address else "IPv4"
    return {
        "ID": party.endpoint,
        family: party.address,
        "Port": party.port,
        "Identity": party.identity,
        "Labels": [
            {"Key": one.key, "Value": one.value, "Source": one.source} for one in map(parse, party.labels)
        ],
    }


def read_party(party: dict[str, Any]) -> Party:
    """Return the party of a decoded EndpointInfo."""
    address = party.get("IPv4") or party.get("IPv6", "")
    labels = (
        Label(one.get("Source", ""), one.get("Key", ""), one.get("Value", ""))
        for one in party.get("Labels", ())
    )
    return Party(
        address, party.get("Port", 0), party.get("Identity", 0), party.get("ID", 0), tuple(map(str, labels))
    )


# A proxied request: its client, server, contents and result.
#
# Source: Cilium 1.17, monitor events of type 129: gob of ``LogRecordNotify{LogRecord}``
#         (pkg/proxy/accesslog).

REQUEST: Final = 129
_NOTIFY, _RECORD, _HTTP, _URL, _HEADERS, _TEXTS = range(66, 72)
_TYPES: Final = {
    _NOTIFY: Type("LogRecordNotify", {"LogRecord": _RECORD}),
    _RECORD: Type("LogRecord", {**RECORD, "HTTP": _HTTP}),
    _HTTP: Type(
        "LogRecordHTTP",
        {"Code": INT, "Method": STRING, "URL": _URL, "Protocol": STRING, "Headers": _HEADERS},
    ),
    _URL: Type("URL"),
    _HEADERS: Type("Header", of=_TEXTS, by_text=True),
    _TEXTS: Type("[]string", of=STRING),
    **TYPES,
}


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request or its response."""

    answer: bool
    time: str
    """RFC 3339, with nanoseconds."""
    ingress: bool
    """Whether the server's ingress policy was enforced; otherwise the client's egress policy."""
    source: Party
    destination: Party
    verdict: str
    """Forwarded, Denied or Error."""
    code: int = 0
    """Status code of the response."""
    method: str
    url: str
    protocol: str
    headers: dict[str, list[str]] = {}


def request_sample(record: RequestRecord) -> bytes:
    """Encode a request as an event."""
    ends = {"SourceEndpoint": record.source, "DestinationEndpoint": record.destination}
    value: dict[str, Any] = {
        "Type": "Response" if record.answer else "Request",
        "Timestamp": record.time,
        "ObservationPoint": "Ingress" if record.ingress else "Egress",
        **{name: party_value(party) for name, party in ends.items()},
        "IPVersion": int(":" in record.source.address),
        "Verdict": record.verdict,
        "TransportProtocol": 6,
        "HTTP": {
            "Code": record.code,
            "Method": record.method,
            "URL": record.url,
            "Protocol": record.protocol,
            "Headers": record.headers,
        },
    }
    return bytes((REQUEST,)) + gob.encode(_TYPES, {"LogRecord": value})


def read_request(record: dict[str, Any]) -> RequestRecord | None:
    """Return the record of a decoded event; None if it is not HTTP."""
    request = record.get("HTTP")
    if request is None:
        return None
    return RequestRecord(
        answer=record.get("Type") == "Response",
        time=record.get("Timestamp", ""),
        ingress=record.get("ObservationPoint") == "Ingress",
        source=read_party(record.get("SourceEndpoint", {})),
        destination=read_party(record.get("DestinationEndpoint", {})),
        verdict=record.get("Verdict", ""),
        code=request.get("Code", 0),
        method=request.get("Method", ""),
        url=request.get("URL", ""),
        protocol=request.get("Protocol", ""),
        headers=request.get("Headers", {}),
    )


# A DNS lookup: client, server, name and answer.
#
# Source: Cilium 1.17, LogRecordDNS of pkg/proxy/accesslog; of events of type 129 like requests.

PROXY: Final = "proxy"
"""The observation source."""
NAMES: Final = {
    1: "A",
    2: "NS",
    5: "CNAME",
    6: "SOA",
    12: "PTR",
    15: "MX",
    16: "TXT",
    28: "AAAA",
    33: "SRV",
    65: "HTTPS",
    255: "ANY",
}
"""Query types by number."""
_LOOKUP_NOTIFY, _LOOKUP_RECORD, _DNS, _IPS, _LOOKUP_TEXTS, _NUMBERS = range(66, 72)
_LOOKUP_TYPES: Final = {
    _LOOKUP_NOTIFY: Type("LogRecordNotify", {"LogRecord": _LOOKUP_RECORD}),
    _LOOKUP_RECORD: Type("LogRecord", {**RECORD, "DNS": _DNS}),
    _DNS: Type(
        "LogRecordDNS",
        {
            "Query": STRING,
            "IPs": _IPS,
            "TTL": UINT,
            "CNAMEs": _LOOKUP_TEXTS,
            "ObservationSource": STRING,
            "RCode": INT,
            "QTypes": _NUMBERS,
            "AnswerTypes": _NUMBERS,
        },
    ),
    _IPS: Type("[]net.IP", of=BYTES),
    _LOOKUP_TEXTS: Type("[]string", of=STRING),
    _NUMBERS: Type("[]uint16", of=UINT),
    **TYPES,
}


class LookupRecord(msgspec.Struct, kw_only=True):
    """A DNS query or its response; a response has the server as ``source``."""

    answer: bool
    time: str
    """RFC 3339, with microseconds."""
    source: Party
    destination: Party
    protocol: int
    """TCP or UDP, by number."""
    verdict: str
    """Forwarded, Denied or Error."""
    query: str
    """The name, with a final dot."""
    type: int
    """The query type, by number."""
    code: int = 0
    """RCODE."""
    addresses: tuple[str, ...] = ()
    ttl: int = 0
    """Seconds, the minimum of all records."""
    aliases: tuple[str, ...] = ()
    answer_types: tuple[int, ...] = ()
    """Types of the response's records."""


def lookup_sample(record: LookupRecord) -> bytes:
    """Encode a lookup as an event."""
    ends = {"SourceEndpoint": record.source, "DestinationEndpoint": record.destination}
    value: dict[str, Any] = {
        "Type": "Response" if record.answer else "Request",
        "Timestamp": record.time,
        "ObservationPoint": "Egress",
        **{name: party_value(party) for name, party in ends.items()},
        "IPVersion": int(":" in record.source.address),
        "Verdict": record.verdict,
        "TransportProtocol": record.protocol,
        "DNS": {
            "Query": record.query,
            "IPs": [_go_address(one) for one in record.addresses],
            "TTL": record.ttl,
            "CNAMEs": list(record.aliases),
            "ObservationSource": PROXY,
            "RCode": record.code,
            "QTypes": [record.type],
            "AnswerTypes": list(record.answer_types),
        },
    }
    return bytes((REQUEST,)) + gob.encode(_LOOKUP_TYPES, {"LogRecord": value})


def _go_address(text: str) -> bytes:
    """Return an address as net.IP: 4 or 16 bytes."""
    return ip_address(text).packed


def read_lookup(record: dict[str, Any]) -> LookupRecord | None:
    """Return the record of a decoded event; None if it is not DNS. Raises ValueError."""
    lookup = record.get("DNS")
    if lookup is None:
        return None
    return LookupRecord(
        answer=record.get("Type") == "Response",
        time=record.get("Timestamp", ""),
        source=read_party(record.get("SourceEndpoint", {})),
        destination=read_party(record.get("DestinationEndpoint", {})),
        protocol=record.get("TransportProtocol", 0),
        verdict=record.get("Verdict", ""),
        query=lookup.get("Query", ""),
        type=next(iter(lookup.get("QTypes", ())), 0),
        code=lookup.get("RCode", 0),
        addresses=tuple(str(ip_address(one)) for one in lookup.get("IPs", ())),
        ttl=lookup.get("TTL", 0),
        aliases=tuple(lookup.get("CNAMEs", ())),
        answer_types=tuple(lookup.get("AnswerTypes", ())),
    )
