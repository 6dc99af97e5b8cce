"""Explain connections: the verdict of both ends' policies, and the rules that decide.

A connection to a service has one way per backend. A query without a port has one way per range of ports with
the same decision. ``directory`` resolves the ends; ``reasons`` decides. Pure values; no cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Final, Literal, NamedTuple

import msgspec

from cells.policy.compute import FULL_PORT, RuleOrigin
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.explain.reasons import OtherSide, Reason, decide
from cells.policy.labels import LabelSet
from cells.policy.rules import PROTOCOLS, Direction

__all__ = [
    "ANY_PORT",
    "OTHER",
    "PORTS",
    "EnclosingPrefix",
    "End",
    "Explained",
    "ExplainedConnection",
    "ExplainedDirection",
    "NearRule",
    "Target",
    "UnanswerableError",
    "explained",
    "headline",
]


Verdict = Literal["allowed", "denied", "elsewhere", "mixed"]
"""``elsewhere``: allowed by this node, and another node decides too. ``mixed``: only some ways are denied."""

ANY_PORT: Final = "any port"
OTHER: Final = "any other port"
UNUSED_PROTOCOL: Final = 253
"""A protocol that no rule names (RFC 3692): its decision is that of all other protocols and ports."""
PORTS: Final = {"TCP": 65535, "UDP": 65535, "SCTP": 65535, "ICMP": 255, "ICMPV6": 255}
"""The last port of each protocol; for ICMP, the last type."""
SHOWN: Final = 3
WORLD: Final = (2, 9, 10)


class UnanswerableError(Exception):
    """The query is invalid or cannot be answered; the message is one line."""


class EnclosingPrefix(msgspec.Struct, frozen=True):
    """The longest prefix in rules around a pod's address; identity 0 if there is none."""

    version: int
    identity: int = 0
    labels: LabelSet = LabelSet(())


NO_PREFIX: Final = EnclosingPrefix(0)


class End(NamedTuple):
    """One end of a connection."""

    title: str
    identity: int
    labels: LabelSet
    key: str = ""
    """Equal for the same pod; empty for other ends."""
    policy: Callable[[Direction], DirectionPolicy] | None = None
    """Returns its policy; None if another node enforces it, or none does. Raises UnanswerableError."""
    elsewhere: str = ""
    """The node that enforces its policy, if it is another one."""
    audited: bool = False
    """Whether its policy only reports denied traffic (``policy-audit-mode``)."""
    no_http_proxy: str = ""
    """Why traffic with HTTP rules is dropped; empty if the HTTP proxy runs."""
    network: IPv4Network | IPv6Network | None = None
    """Its address or prefix, if the query names it."""
    around: tuple[EnclosingPrefix, ...] = ()
    """The prefix around each address of a pod, if CIDR rules select pods."""

    @property
    def peer(self) -> OtherSide:
        """The end as the peer of the other end's policy."""
        near = self.around[0] if self.around else NO_PREFIX
        return OtherSide(self.identity, self.labels, near.identity, near.labels)

    @property
    def is_outside(self) -> bool:
        """Whether the end is outside the cluster."""
        return self.identity in WORLD or self.identity >> 24 == 1


class Target(NamedTuple):
    """The destination of a connection; for ICMP the port is the type."""

    end: End
    protocol: int = 0
    port: int | None = None
    """The port; None for all ports, of every protocol."""
    via: str = ""
    """The frontend that is translated to this destination."""
    problem: str = ""
    """Why packets do not arrive, regardless of policies."""
    note: str = ""


class NearRule(msgspec.Struct, frozen=True):
    """A rule that almost allows the connection, and what it lacks."""

    rule: str
    missing: str


class ExplainedDirection(msgspec.Struct, frozen=True):
    """The decision in one direction of one end, as text, with its rules."""

    direction: str
    of: str
    verdict: str
    allowed: bool
    enforced: bool
    """Whether policy is enforced in this direction of the end."""
    entry: str
    rules: Sequence[str]
    near: Sequence[NearRule]
    requests: Sequence[str]
    """HTTP requests that the rules allow; empty without HTTP rules, or if all are allowed."""
    audited: bool
    """Whether policies deny the traffic, but the node only reports it."""


class ExplainedConnection(msgspec.Struct, frozen=True):
    """A connection to one destination and port, or to several ports with the same decision."""

    destination: str
    port: str
    via: str
    verdict: Verdict
    directions: Sequence[ExplainedDirection]
    elsewhere: Sequence[str]
    """Directions that other nodes decide, e.g. ``ingress decided on node-2``."""
    problem: str
    note: str


class Explained(msgspec.Struct, frozen=True):
    """The decisions on all ways of a connection; the headline summarises them."""

    source: str
    destination: str
    verdict: Verdict
    allowed: bool
    headline: str
    ways: Sequence[ExplainedConnection]
    notes: Sequence[str]

    @property
    def denying(self) -> list[str]:
        """The directions in which at least one way is denied."""
        return list(
            dict.fromkeys(one.direction for way in self.ways for one in way.directions if not one.allowed)
        )


RuleText = Callable[[RuleOrigin], str]


def explained(
    source: End,
    destination: str,
    targets: Iterable[Target],
    rule_text: RuleText,
    notes: Sequence[str] = (),
) -> Explained:
    """Explain the connection from the source to each target."""
    ways = [way for target in targets for way in _ways_by_family(source, target, rule_text)]
    verdict, words = headline(ways)
    return Explained(
        source=source.title,
        destination=destination,
        verdict=verdict,
        allowed=verdict == "allowed",
        headline=words,
        ways=ways,
        notes=notes,
    )


# Ways.


def _ways_by_family(source: End, target: Target, rule_text: RuleText) -> Iterator[ExplainedConnection]:
    """Yield the ways per IP family if the families' decisions differ, else once."""
    of_source = {one.version: one for one in source.around}
    of_target = {one.version: one for one in target.end.around}
    versions = sorted(of_source.keys() & of_target.keys() or of_source.keys() | of_target.keys() or {0})
    found: dict[int, list[ExplainedConnection]] = {}
    for version in versions:
        near, far = of_source.get(version), of_target.get(version)
        source_of_family = source._replace(around=(near,) if near else ())
        target_of_family = target._replace(end=target.end._replace(around=(far,) if far else ()))
        found[version] = list(_ways(source_of_family, target_of_family, rule_text))
    first = found[versions[0]]
    if all(ways == first for ways in found.values()):
        yield from first
        return
    for version, ways in found.items():
        for way in ways:
            yield msgspec.structs.replace(way, destination=f"{way.destination} by IPv{version}")


def _ways(source: End, target: Target, rule_text: RuleText) -> Iterator[ExplainedConnection]:
    if target.problem or (source.key and source.key == target.end.key):
        yield _way_without_policy(source, target)
        return
    sides = [
        (end, end.policy(direction), other)
        for end, other, direction in _directions(source, target.end)
        if end.policy is not None
    ]
    if target.port is not None:
        port = port_text(target.port, target.protocol)
        yield _way(source, target, port, _reasons(sides, target.protocol, target.port), rule_text)
        return
    for port, reasons in _by_port(sides):
        yield _way(source, target, port, reasons, rule_text)


def _way_without_policy(source: End, target: Target) -> ExplainedConnection:
    """Return a way without policy decisions: packets do not arrive, or do not leave the sender."""
    note = target.note
    if not target.problem:
        note = f"{source.title} reaches itself: no policy applies"
    return ExplainedConnection(
        destination=target.end.title,
        port=port_text(target.port, target.protocol) if target.port is not None else ANY_PORT,
        via=target.via,
        verdict="denied" if target.problem else "allowed",
        directions=(),
        elsewhere=(),
        problem=target.problem,
        note=note,
    )


def _directions(source: End, destination: End) -> tuple[tuple[End, End, Direction], ...]:
    return (source, destination, "egress"), (destination, source, "ingress")


Side = tuple[End, DirectionPolicy, End]


def _reasons(sides: Sequence[Side], protocol: int, port: int) -> tuple[Reason, ...]:
    return tuple(
        decide(policy, other.peer, protocol, port, end.no_http_proxy) for end, policy, other in sides
    )


def _way(
    source: End, target: Target, port: str, reasons: Sequence[Reason], rule_text: RuleText
) -> ExplainedConnection:
    deciding = [
        (end, reason)
        for (end, _, direction), reason in zip(
            [each for each in _directions(source, target.end) if each[0].policy is not None],
            reasons,
            strict=True,
        )
    ]
    directions = [_explained_direction(end, reason, rule_text) for end, reason in deciding]
    elsewhere = [
        f"{direction} decided on {end.elsewhere}"
        for end, _, direction in _directions(source, target.end)
        if end.elsewhere
    ]
    denied = any(not one.allowed for one in directions)
    return ExplainedConnection(
        destination=target.end.title,
        port=port,
        via=target.via,
        verdict="denied" if denied else "elsewhere" if elsewhere else "allowed",
        directions=directions,
        elsewhere=elsewhere,
        problem="",
        note=target.note,
    )


def _explained_direction(end: End, reason: Reason, rule_text: RuleText) -> ExplainedDirection:
    audited = end.audited and not reason.allowed
    return ExplainedDirection(
        direction=reason.direction,
        of=end.title,
        verdict=reason.match.verdict,
        allowed=reason.allowed or audited,
        enforced=reason.enforced,
        entry=reason.entry_text,
        rules=[rule_text(origin) for origin in reason.origins] if reason.enforced else [],
        near=[NearRule(rule_text(near.origin), near.missing) for near in reason.near],
        requests=reason.requests,
        audited=audited,
    )


# Port ranges.


def _by_port(sides: Sequence[Side]) -> Iterator[tuple[str, tuple[Reason, ...]]]:
    """Yield port ranges with a decision of their own, and the decision for all other ports."""
    others = _reasons(sides, UNUSED_PROTOCOL, 0)
    only_others = True
    for name, last in PORTS.items():
        protocol = PROTOCOLS[name]
        for first, end, reasons in _port_ranges(sides, protocol, last):
            if _same(reasons, others):
                continue
            only_others = False
            ports = str(first) if first == end else f"{first}-{end}"
            yield f"{ANY_PORT if (first, end) == (0, last) else ports}/{name}", reasons
    yield (ANY_PORT if only_others else OTHER), others


def _port_ranges(
    sides: Sequence[Side], protocol: int, last: int
) -> Iterator[tuple[int, int, tuple[Reason, ...]]]:
    """Yield the ranges of a protocol's ports with the same decision: first port, last port, reasons."""
    firsts = {0}
    for _, policy, other in sides:
        named = (key for filter_ in policy.filters for key in policy.port_keys(filter_.port))
        own = (key for number in other.peer.numbers for key in policy.of(number))
        for key in (*policy.wildcard_entries(), *own, *named):
            if key.protocol == protocol:
                firsts |= {key.port, key.port + (1 << FULL_PORT - key.bits)}
    starts = sorted(each for each in firsts if each <= last)
    current: tuple[int, int, tuple[Reason, ...]] | None = None
    for start, following in zip(starts, [*starts[1:], last + 1], strict=True):
        reasons = _reasons(sides, protocol, start)
        if current is not None and _same(current[2], reasons):
            current = current[0], following - 1, current[2]
            continue
        if current is not None:
            yield current
        current = start, following - 1, reasons
    if current is not None:
        yield current


def _same(one: Sequence[Reason], other: Sequence[Reason]) -> bool:
    """Whether verdicts, deciding rules, requests and near rules are equal."""
    return [(each.match.verdict, each.origins, each.requests, each.near) for each in one] == [
        (each.match.verdict, each.origins, each.requests, each.near) for each in other
    ]


def port_text(port: int, protocol: int) -> str:
    """Format a port: ``80/TCP``."""
    names = {number: name for name, number in PROTOCOLS.items()}
    return f"{port}/{names.get(protocol, protocol)}"


# The headline.


def headline(ways: Sequence[ExplainedConnection], here: str = "here") -> tuple[Verdict, str]:
    """Return the combined verdict and a one-line summary; ``here`` names the node of the query."""
    groups: dict[str, list[ExplainedConnection]] = {}
    for way in sorted(ways, key=_rank):
        groups.setdefault(_words(way, here), []).append(way)
    verdicts = {way.verdict for way in ways}
    verdict: Verdict = (
        ("mixed" if len(verdicts) > 1 else "denied")
        if "denied" in verdicts
        else "elsewhere"
        if "elsewhere" in verdicts
        else "allowed"
    )
    if len(groups) == 1:
        return verdict, next(iter(groups))
    return verdict, "; ".join(f"{words} {_qualifier(some, ways)}" for words, some in groups.items())


def _rank(way: ExplainedConnection) -> tuple[bool, int]:
    """Sort key: ways with named ports first, denied ways first."""
    return way.port == OTHER, ("denied", "elsewhere", "allowed").index(way.verdict)


def _words(way: ExplainedConnection, here: str) -> str:
    if way.problem:
        return f"denied: {way.problem}"
    if way.verdict == "denied":
        return "denied"
    if way.verdict == "elsewhere":
        return ", ".join([*(f"{one.direction} allowed {here}" for one in way.directions), *way.elsewhere])
    if any(one.audited for one in way.directions):
        return "allowed, as denials are only reported (policy-audit-mode)"
    if any(one.requests for one in way.directions):
        return "allowed for some requests"
    return "allowed"


def _qualifier(some: Sequence[ExplainedConnection], every: Sequence[ExplainedConnection]) -> str:
    """Format which of the ways these are."""
    ports, destinations = ({getattr(way, name) for way in every} for name in ("port", "destination"))
    if len(destinations) == 1:
        return f"on {_listed([way.port for way in some])}"
    if len(ports) == 1:
        return f"for {_listed([way.destination for way in some])}"
    return f"for {_listed([f'{way.destination} on {way.port}' for way in some])}"


def _listed(texts: Iterable[str]) -> str:
    shown = list(dict.fromkeys(texts))
    more = len(shown) - SHOWN
    return f"{', '.join(shown[:SHOWN])} and {more} more" if more > 0 else ", ".join(shown)
