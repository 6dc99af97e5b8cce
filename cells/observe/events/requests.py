"""A proxied request: its client, server, contents and result.

For:    Envoy's cell, which tells them, and those who show events.   Needs: gob, Party.
Gives:  RequestRecord, request_sample(), read_request(), REQUEST.
Source: Cilium 1.17, monitor events of type 129: gob of ``LogRecordNotify{LogRecord}`` (pkg/proxy/accesslog).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cells.observe.events import gob
from cells.observe.events.gob import INT, STRING, Type
from cells.observe.events.parties import RECORD, TYPES, Party, party_value, read_party

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
    """A request, or the answer to one."""

    answer: bool
    time: str
    """RFC 3339, with nanoseconds."""
    ingress: bool
    """Whether the server's policy was applied; else the client's."""
    source: Party
    destination: Party
    verdict: str
    """Forwarded, Denied or Error."""
    code: int = 0
    """The status of the answer."""
    method: str
    url: str
    protocol: str
    headers: dict[str, list[str]] = {}


def request_sample(record: RequestRecord) -> bytes:
    """As an event."""
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
    """The record of an event; None for one that is not about HTTP."""
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
