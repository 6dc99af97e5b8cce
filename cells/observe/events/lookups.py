"""What the DNS proxy says of a lookup: who asked which server for which name, and what it said.

For:    the DNS proxy's cell, which tells them, and those who show events.   Needs: gob, Party.
Gives:  LookupRecord, lookup_sample(), read_lookup().
Source: Cilium 1.17, LogRecordDNS of pkg/proxy/accesslog; of events of type 129 like requests.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Final

import msgspec

from cells.observe.events import gob
from cells.observe.events.gob import BYTES, INT, STRING, UINT, Type
from cells.observe.events.parties import RECORD, TYPES, Party, party_value, read_party
from cells.observe.events.requests import REQUEST

PROXY: Final = "proxy"
"""Where the packet was observed."""
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
"""Types that are asked for, by their numbers."""
_NOTIFY, _RECORD, _DNS, _IPS, _TEXTS, _NUMBERS = range(66, 72)
_TYPES: Final = {
    _NOTIFY: Type("LogRecordNotify", {"LogRecord": _RECORD}),
    _RECORD: Type("LogRecord", {**RECORD, "DNS": _DNS}),
    _DNS: Type(
        "LogRecordDNS",
        {
            "Query": STRING,
            "IPs": _IPS,
            "TTL": UINT,
            "CNAMEs": _TEXTS,
            "ObservationSource": STRING,
            "RCode": INT,
            "QTypes": _NUMBERS,
            "AnswerTypes": _NUMBERS,
        },
    ),
    _IPS: Type("[]net.IP", of=BYTES),
    _TEXTS: Type("[]string", of=STRING),
    _NUMBERS: Type("[]uint16", of=UINT),
    **TYPES,
}


class LookupRecord(msgspec.Struct, kw_only=True):
    """A query, or the answer to one: that comes from the server, its ``source``."""

    answer: bool
    time: str
    """RFC 3339, with microseconds."""
    source: Party
    destination: Party
    protocol: int
    """TCP or UDP, by its number."""
    verdict: str
    """Forwarded, Denied or Error."""
    query: str
    """The name, ending in a dot."""
    type: int
    """What is asked for, by the number of its type."""
    code: int = 0
    """RCODE."""
    addresses: tuple[str, ...] = ()
    ttl: int = 0
    """Seconds, the least of all records."""
    aliases: tuple[str, ...] = ()
    answer_types: tuple[int, ...] = ()
    """Of the answer's records."""


def lookup_sample(record: LookupRecord) -> bytes:
    """As an event."""
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
    return bytes((REQUEST,)) + gob.encode(_TYPES, {"LogRecord": value})


def _go_address(text: str) -> bytes:
    """As net.IP: both families in 4 or 16 bytes."""
    return ip_address(text).packed


def read_lookup(record: dict[str, Any]) -> LookupRecord | None:
    """The record of an event; None for one that is not about DNS. Raises ValueError."""
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
