"""What a proxy says of a request: who asked whom for what, and what became of it.

For:    Envoy's cell, which tells them, and those who show events.   Needs: gob, parse() of labels.
Gives:  RequestRecord, Party, request_sample(), read_request(), REQUEST.
Source: Cilium 1.17, monitor events of type 129: gob of ``LogRecordNotify{LogRecord}`` (pkg/proxy/accesslog).
        Labels are a ``labels.LabelArray``, as 1.17 has them; earlier versions had texts there.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cells.cluster.identity import Label, parse
from cells.observe.events import gob
from cells.observe.events.gob import INT, STRING, UINT, Type

REQUEST: Final = 129
_NOTIFY, _RECORD, _NODE, _ENDPOINT, _HTTP, _URL, _HEADERS, _TEXTS, _LABELS, _LABEL = range(66, 76)
_TYPES: Final = {
    _NOTIFY: Type("LogRecordNotify", {"LogRecord": _RECORD}),
    _RECORD: Type(
        "LogRecord",
        {
            "Type": STRING,
            "Timestamp": STRING,
            "NodeAddressInfo": _NODE,
            "ObservationPoint": STRING,
            "SourceEndpoint": _ENDPOINT,
            "DestinationEndpoint": _ENDPOINT,
            "IPVersion": UINT,
            "Verdict": STRING,
            "TransportProtocol": UINT,
            "HTTP": _HTTP,
        },
    ),
    _NODE: Type("NodeAddressInfo", {"IPv4": STRING, "IPv6": STRING}),
    _ENDPOINT: Type(
        "EndpointInfo",
        {"ID": UINT, "IPv4": STRING, "IPv6": STRING, "Port": UINT, "Identity": UINT, "Labels": _LABELS},
    ),
    _HTTP: Type(
        "LogRecordHTTP",
        {"Code": INT, "Method": STRING, "URL": _URL, "Protocol": STRING, "Headers": _HEADERS},
    ),
    _URL: Type("URL"),
    _HEADERS: Type("Header", of=_TEXTS, by_text=True),
    _TEXTS: Type("[]string", of=STRING),
    _LABELS: Type("LabelArray", of=_LABEL),
    _LABEL: Type("Label", {"Key": STRING, "Value": STRING, "Source": STRING}),
}


class Party(msgspec.Struct, frozen=True):
    """Who asks, or is asked."""

    address: str
    port: int
    identity: int
    endpoint: int = 0
    """0 for one that is none of this node."""
    labels: tuple[str, ...] = ()
    """Of the identity, sorted; none where they are not known."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request, or the answer to one."""

    answer: bool
    time: str
    """RFC 3339, with nanoseconds."""
    ingress: bool
    """Whether the policy of who is asked was applied; else that of who asks."""
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
        **{name: _endpoint(party) for name, party in ends.items()},
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


def _endpoint(party: Party) -> dict[str, Any]:
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


def read_request(data: bytes) -> RequestRecord | None:
    """The record in an event; None for one that is not about HTTP. Raises GobError."""
    record = gob.decode(data[1:]).get("LogRecord", {})
    request = record.get("HTTP")
    if request is None:
        return None
    return RequestRecord(
        answer=record.get("Type") == "Response",
        time=record.get("Timestamp", ""),
        ingress=record.get("ObservationPoint") == "Ingress",
        source=_party(record.get("SourceEndpoint", {})),
        destination=_party(record.get("DestinationEndpoint", {})),
        verdict=record.get("Verdict", ""),
        code=request.get("Code", 0),
        method=request.get("Method", ""),
        url=request.get("URL", ""),
        protocol=request.get("Protocol", ""),
        headers=request.get("Headers", {}),
    )


def _party(said: dict[str, Any]) -> Party:
    address = said.get("IPv4") or said.get("IPv6", "")
    labels = (
        Label(one.get("Source", ""), one.get("Key", ""), one.get("Value", ""))
        for one in said.get("Labels", ())
    )
    return Party(
        address, said.get("Port", 0), said.get("Identity", 0), said.get("ID", 0), tuple(map(str, labels))
    )


def request_text(record: RequestRecord) -> str:
    """One line, without its end, as Cilium 1.17's monitor has it."""
    source, destination = _party_text(record.source), _party_text(record.destination)
    arrow = "<-" if record.ingress else "->"
    what = f"Response http to {destination} from {source}"
    if not record.answer:
        what = f"Request http from {source} to {destination}"
    return (
        f"{arrow} {what}, identity {record.source.identity}->{record.destination.identity},"
        f" verdict {record.verdict} {record.method} {record.url} => {record.code}"
    )


def _party_text(party: Party) -> str:
    return f"{party.endpoint} ([{' '.join(party.labels)}])"
