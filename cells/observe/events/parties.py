"""The two parties of a proxied request or lookup: as values, in Go's gob, as text.

For:    records of requests and of lookups.   Needs: gob, parse() of labels.
Gives:  Party, RECORD, TYPES, party_value(), read_party().
Source: Cilium 1.17, EndpointInfo of pkg/proxy/accesslog.
        Labels are a ``labels.LabelArray``, as 1.17 has them; earlier versions had texts there.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cells.cluster.identity import Label, parse
from cells.observe.events.gob import STRING, UINT, Type

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
"""Of a record's ends, by numbers that a record's own types leave free."""
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
"""Fields of a ``LogRecord``; then comes what was asked for."""


class Party(msgspec.Struct, frozen=True):
    """Who asks, or is asked."""

    address: str
    port: int
    identity: int
    endpoint: int = 0
    """0 for one that is none of this node."""
    labels: tuple[str, ...] = ()
    """Of the identity, sorted; none where they are not known."""


def party_value(party: Party) -> dict[str, Any]:
    """As gob has it."""
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


def read_party(said: dict[str, Any]) -> Party:
    """Of what gob has."""
    address = said.get("IPv4") or said.get("IPv6", "")
    labels = (
        Label(one.get("Source", ""), one.get("Key", ""), one.get("Value", ""))
        for one in said.get("Labels", ())
    )
    return Party(
        address, said.get("Port", 0), said.get("Identity", 0), said.get("ID", 0), tuple(map(str, labels))
    )
