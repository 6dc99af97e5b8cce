"""Why a connection of an endpoint of this node is allowed or not: what ``hive policy explain`` asks.

Needs: PolicyView where rules are known, Endpoints, Identities, Table[IpcacheEntry].
Gives: ExplainOperations, part.
Each direction is decided on the node of its pod: of the other end, this node knows the identity alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from itertools import permutations
from typing import NamedTuple

from cells.api.models.hive import (
    DecidingRule,
    Explained,
    ExplainedDirection,
    Failure,
    NearRule,
    Reached,
    VerdictRules,
)
from cells.api.part import ApiPart, Route
from cells.api.wire import answer
from cells.cluster.identity import RESERVED_IDENTITIES, Identities
from cells.cluster.ipcache import IpcacheEntry
from cells.endpoint import Endpoint, Endpoints
from cells.ipam import IPAddress
from cells.policy.control import (
    PROTOCOLS,
    Direction,
    NamedAddresses,
    PolicyView,
    Reason,
    canonical_name,
)
from lifecycle import Member, Table
from lifecycle.http import Request, Response

GLOBAL_IDENTITIES = range(256, 1 << 24)
"""Of pods, on this node or on others."""


class Asked(NamedTuple):
    """A destination's port; for ICMP the port is the type."""

    port: int
    protocol: int
    name: str


class Peer(NamedTuple):
    """One end of a connection."""

    name: str
    identity: int
    endpoint: Endpoint | None


class _RefusedError(Exception):
    """The question cannot be answered; one line."""


class ExplainOperations:
    """The handlers."""

    def __init__(
        self,
        view: PolicyView | None,
        endpoints: Endpoints,
        identities: Identities,
        prefixes: Table[IpcacheEntry],
        names: NamedAddresses | None,
    ) -> None:
        self._view = view
        self._endpoints = endpoints
        self._identities = identities
        self._prefixes = prefixes
        self._names = names

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/hive/policy/explain", self.get_explanation),
            Route("GET", "/hive/policy/reachability", self.get_reachability),
            Route("GET", "/hive/policy/verdict", self.get_verdict),
        ]

    async def get_explanation(self, request: Request) -> Response:
        """GET /hive/policy/explain: both directions of a connection, as far as this node decides them."""
        query = request.query
        try:
            asked = _asked(query)
            source, destination = (
                self._peer(query.get("source", "")),
                self._peer(query.get("destination", "")),
            )
            found = self._explained(source, destination, asked)
        except _RefusedError as refused:
            return answer(400, Failure(err=str(refused)))
        return answer(200, found)

    async def get_reachability(self, request: Request) -> Response:
        """GET /hive/policy/reachability: who of a namespace's pods on this node reaches whom on a port."""
        namespace = request.query.get("namespace", "")
        try:
            asked = _asked(request.query)
            found = [self._reached(*pair, asked) for pair in permutations(self._pods(namespace), 2)]
        except _RefusedError as refused:
            return answer(400, Failure(err=str(refused)))
        return answer(200, found)

    async def get_verdict(self, request: Request) -> Response:
        """GET /hive/policy/verdict: which rules decided the verdict in an event of the datapath."""
        try:
            endpoint, identity, protocol, port = (
                _number(request.query, name) for name in ("endpoint", "identity", "protocol", "port")
            )
            direction = _direction_of(request.query)
        except _RefusedError as refused:
            return answer(400, Failure(err=str(refused)))
        if self._view is None or not self._view.knows(endpoint):
            return answer(200, VerdictRules(verdict="unknown", rules=[]))
        match = self._view.decide(endpoint, direction, identity, protocol, port)
        origins = sorted(match.entry.origins) if match.entry is not None else []
        rules = [DecidingRule(rule=one.text, labels=one.labels) for one in origins]
        return answer(200, VerdictRules(verdict=match.verdict, rules=rules))

    def _pods(self, namespace: str) -> list[Peer]:
        there = [one for one in self._endpoints.all() if one.pod_name and one.pod_namespace == namespace]
        if not there:
            raise _RefusedError(f"there are no pods of namespace {namespace} on this node")
        return [Peer(one.pod, one.identity, one) for one in there]

    def _reached(self, source: Peer, destination: Peer, asked: Asked) -> Reached:
        told = self._explained(source, destination, asked)
        denied = [one.direction for one in told.directions if not one.allowed]
        return Reached(
            source=source.name,
            destination=destination.name,
            port=f"{asked.port}/{asked.name}",
            denied=" and ".join(denied),
        )

    def _explained(self, source: Peer, destination: Peer, asked: Asked) -> Explained:
        if source.endpoint is None and destination.endpoint is None:
            raise _RefusedError("neither end is an endpoint of this node: ask the agent of its node")
        directions = [
            *self._direction(source, destination, "egress", asked),
            *self._direction(destination, source, "ingress", asked),
        ]
        elsewhere = [
            f"{direction} of {peer.name} is decided on its node"
            for peer, direction in ((source, "egress"), (destination, "ingress"))
            if peer.endpoint is None and peer.identity in GLOBAL_IDENTITIES
        ]
        return Explained(
            allowed=all(one.allowed for one in directions), directions=directions, elsewhere=elsewhere
        )

    def _direction(
        self, of: Peer, other: Peer, direction: Direction, asked: Asked
    ) -> Iterator[ExplainedDirection]:
        if of.endpoint is None or self._view is None:
            return
        labels = self._labels(other.identity)
        reason = self._view.explain(
            of.endpoint.id, direction, other.identity, labels, asked.protocol, asked.port
        )
        if reason is None:
            raise _RefusedError(f"{of.name} has no policy yet")
        yield _told(reason, of.name)

    def _labels(self, identity: int) -> tuple[str, ...]:
        known = self._identities.table.get(identity)
        if known is not None:
            return tuple(known.labels)
        return tuple(RESERVED_IDENTITIES.get(identity, ()))

    def _peer(self, text: str) -> Peer:
        """A pod (NAMESPACE/NAME), an address, a name of DNS, or an identity by name or number."""
        for number, labels in RESERVED_IDENTITIES.items():
            if f"reserved:{text.removeprefix('reserved:')}" in labels:
                return Peer(text, number, None)
        if text.isascii() and text.isdigit():
            if not self._labels(int(text)):
                raise _RefusedError(f"there is no identity {text}")
            return Peer(f"identity {text}", int(text), None)
        try:
            address = ip_address(text)
        except ValueError:
            return self._named(text)
        for one in self._endpoints.all():
            if address in one.addresses:
                return Peer(one.title, one.identity, one)
        return Peer(text, self._identity(address), None)

    def _identity(self, address: IPAddress) -> int:
        host = ip_network(address)
        for length in range(host.prefixlen, -1, -1):
            row = self._prefixes.get(str(host.supernet(new_prefix=length)))
            if row is not None:
                return int(row.identity)
        raise _RefusedError(f"the identity of {address} is not known")

    def _named(self, text: str) -> Peer:
        """A pod, or what DNS said a name is; of several addresses the first."""
        if "/" in text or "." not in text:
            return self._pod(text)
        addresses = self._names.addresses(canonical_name(text)) if self._names is not None else ()
        if not addresses:
            raise _RefusedError(
                f"{text} is no pod and no name that pods of this node have asked DNS for;"
                " until one has, it is as open as the world is: ask of world"
            )
        first = min(addresses, key=int)
        return Peer(f"{text} ({first})", self._identity(first), None)

    def _pod(self, text: str) -> Peer:
        name = text if "/" in text else f"default/{text}"
        for one in self._endpoints.all():
            if one.pod_name and one.pod == name:
                return Peer(name, one.identity, one)
        raise _RefusedError(f"there is no pod {name} on this node: name the address of one on another node")


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise _RefusedError(f"{name} {text[:20]!r}: expected a number")
    return int(text)


def _direction_of(query: dict[str, str]) -> Direction:
    match query.get("direction", ""):
        case "ingress":
            return "ingress"
        case "egress":
            return "egress"
        case other:
            raise _RefusedError(f"direction {other[:20]!r}: expected ingress or egress")


def _asked(query: dict[str, str]) -> Asked:
    port, protocol = query.get("port", "80"), query.get("protocol", "TCP").upper()
    known = [name for name in PROTOCOLS if name != "ANY"]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise _RefusedError(f"port {port!r}: expected a number up to 65535")
    if protocol not in known:
        raise _RefusedError(f"protocol {protocol!r}: expected one of {', '.join(known)}")
    return Asked(int(port), PROTOCOLS[protocol], protocol)


def _told(reason: Reason, of: str) -> ExplainedDirection:
    return ExplainedDirection(
        direction=reason.direction,
        of=of,
        verdict=reason.match.verdict,
        allowed=reason.allowed,
        enforced=reason.enforced,
        entry=reason.entry_text,
        rules=[one.text for one in reason.origins],
        near=[NearRule(rule=one.origin.text, missing=one.missing) for one in reason.near],
        requests=reason.requests,
    )


def part(operations: ExplainOperations) -> Member[ApiPart]:
    """Explanations, as a part of the API."""
    return ApiPart("policy-explain", operations.routes())
