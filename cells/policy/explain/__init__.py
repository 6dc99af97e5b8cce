"""Seeing why: which rule of which file decides on a connection, and what is wrong in a folder of policies.

Pure values; no cell.
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
    "Around",
    "End",
    "Explained",
    "ExplainedDirection",
    "NearRule",
    "Target",
    "UnanswerableError",
    "Way",
    "explained",
    "headline",
]


# How a connection fares: both ends' policies, for every way that it may take.
#
# A service has a way for each backend, and a question without a port one for each port that policies
# distinguish. Pure values; who knows the ends is a Directory (directory.py).

Verdict = Literal["allowed", "denied", "elsewhere", "mixed"]
"""``elsewhere``: this node allows it, another one decides too. ``mixed``: only some ways are denied."""

ANY_PORT: Final = "any port"
OTHER: Final = "any other port"
UNNAMED: Final = 253
"""A protocol that no rule names (RFC 3692): what it fares by holds for every protocol and port."""
PORTS: Final = {"TCP": 65535, "UDP": 65535, "SCTP": 65535, "ICMP": 255, "ICMPV6": 255}
"""The last port of a protocol, of ICMP the last type."""
SHOWN: Final = 3
WORLD: Final = (2, 9, 10)


class UnanswerableError(Exception):
    """Raised when a question cannot be understood or answered: one line."""


class Around(msgspec.Struct, frozen=True):
    """A network that rules name, around an address of a family; identity 0: they name none around it."""

    version: int
    identity: int = 0
    labels: LabelSet = LabelSet(())


NOWHERE: Final = Around(0)


class End(NamedTuple):
    """One end of a connection."""

    title: str
    identity: int
    labels: LabelSet
    key: str = ""
    """The same for the same pod; empty for what is not a pod."""
    policy: Callable[[Direction], DirectionPolicy] | None = None
    """Its policy, where it is decided here. Raises UnanswerableError."""
    elsewhere: str = ""
    """The node that decides about it, if that is another one."""
    audited: bool = False
    """Whether what its policy denies passes and is only reported."""
    unread: str = ""
    """Why its HTTP rules drop what they select; empty while a proxy reads that."""
    network: IPv4Network | IPv6Network | None = None
    """Its addresses, where it was asked of by them."""
    around: tuple[Around, ...] = ()
    """Of a pod, where networks select pods, too: the network around each of its addresses."""

    @property
    def peer(self) -> OtherSide:
        """As the other side's policy sees it."""
        near = self.around[0] if self.around else NOWHERE
        return OtherSide(self.identity, self.labels, near.identity, near.labels)

    @property
    def is_outside(self) -> bool:
        """Whether it is outside the cluster."""
        return self.identity in WORLD or self.identity >> 24 == 1


class Target(NamedTuple):
    """What is connected to; for ICMP the port is the type."""

    end: End
    protocol: int = 0
    port: int | None = None
    """None: every port that policies distinguish, of every protocol."""
    via: str = ""
    """The frontend that leads to it."""
    problem: str = ""
    """Why nothing arrives there, whatever policies say."""
    note: str = ""


class NearRule(msgspec.Struct, frozen=True):
    """A rule that almost allows a connection, and what is missing."""

    rule: str
    missing: str


class ExplainedDirection(msgspec.Struct, frozen=True):
    """How one direction fares at an end, and by which rules; all in words."""

    direction: str
    of: str
    verdict: str
    allowed: bool
    enforced: bool
    """Whether any policy selects the end for the direction."""
    entry: str
    rules: Sequence[str]
    near: Sequence[NearRule]
    requests: Sequence[str]
    """Requests of HTTP that a proxy lets through; none where it reads none, or all may pass."""
    audited: bool
    """Whether it passes though policies deny it, as the node only reports that."""


class Way(msgspec.Struct, frozen=True):
    """One destination and port, or several ports that fare alike."""

    destination: str
    port: str
    via: str
    verdict: Verdict
    directions: Sequence[ExplainedDirection]
    elsewhere: Sequence[str]
    """Directions that other nodes decide, as ``ingress decided on node-2``."""
    problem: str
    note: str


class Explained(msgspec.Struct, frozen=True):
    """How a connection fares on each of its ways; the headline is the worst of them, or how they differ."""

    source: str
    destination: str
    verdict: Verdict
    allowed: bool
    headline: str
    ways: Sequence[Way]
    notes: Sequence[str]

    @property
    def denying(self) -> list[str]:
        """The directions in which some way is denied."""
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
    """All ways from the source to the targets."""
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


# One way


def _ways_by_family(source: End, target: Target, rule_text: RuleText) -> Iterator[Way]:
    """The ways by each family of the ends' addresses, where these count; once where they fare alike."""
    of_source = {one.version: one for one in source.around}
    of_target = {one.version: one for one in target.end.around}
    versions = sorted(of_source.keys() & of_target.keys() or of_source.keys() | of_target.keys() or {0})
    found: dict[int, list[Way]] = {}
    for version in versions:
        near, far = of_source.get(version), of_target.get(version)
        here = source._replace(around=(near,) if near else ())
        there = target._replace(end=target.end._replace(around=(far,) if far else ()))
        found[version] = list(_ways(here, there, rule_text))
    first = found[versions[0]]
    if all(ways == first for ways in found.values()):
        yield from first
        return
    for version, ways in found.items():
        for way in ways:
            yield msgspec.structs.replace(way, destination=f"{way.destination} by IPv{version}")


def _ways(source: End, target: Target, rule_text: RuleText) -> Iterator[Way]:
    if target.problem or (source.key and source.key == target.end.key):
        yield _without_policy(source, target)
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
    for port, reasons in _every_port(sides):
        yield _way(source, target, port, reasons, rule_text)


def _without_policy(source: End, target: Target) -> Way:
    """A way on which no policy is asked: nothing is there, or the packets stay with their sender."""
    note = target.note
    if not target.problem:
        note = f"{source.title} reaches itself: no policy applies"
    return Way(
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
    return tuple(decide(policy, other.peer, protocol, port, end.unread) for end, policy, other in sides)


def _way(source: End, target: Target, port: str, reasons: Sequence[Reason], rule_text: RuleText) -> Way:
    deciding = [
        (end, reason)
        for (end, _, direction), reason in zip(
            [each for each in _directions(source, target.end) if each[0].policy is not None],
            reasons,
            strict=True,
        )
    ]
    directions = [_shown(end, reason, rule_text) for end, reason in deciding]
    elsewhere = [
        f"{direction} decided on {end.elsewhere}"
        for end, _, direction in _directions(source, target.end)
        if end.elsewhere
    ]
    denied = any(not one.allowed for one in directions)
    return Way(
        destination=target.end.title,
        port=port,
        via=target.via,
        verdict="denied" if denied else "elsewhere" if elsewhere else "allowed",
        directions=directions,
        elsewhere=elsewhere,
        problem="",
        note=target.note,
    )


def _shown(end: End, reason: Reason, rule_text: RuleText) -> ExplainedDirection:
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


# Every port


def _every_port(sides: Sequence[Side]) -> Iterator[tuple[str, tuple[Reason, ...]]]:
    """The ports that fare in their own way, and what holds for all others."""
    others = _reasons(sides, UNNAMED, 0)
    alone = True
    for name, last in PORTS.items():
        protocol = PROTOCOLS[name]
        for first, end, reasons in _stretches(sides, protocol, last):
            if _same(reasons, others):
                continue
            alone = False
            ports = str(first) if first == end else f"{first}-{end}"
            yield f"{ANY_PORT if (first, end) == (0, last) else ports}/{name}", reasons
    yield (ANY_PORT if alone else OTHER), others


def _stretches(
    sides: Sequence[Side], protocol: int, last: int
) -> Iterator[tuple[int, int, tuple[Reason, ...]]]:
    """The ports of a protocol, from first to last, as far as neighbours fare alike for the same reasons."""
    begins = {0}
    for _, policy, other in sides:
        named = (key for filter_ in policy.filters for key in policy.port_keys(filter_.port))
        own = (key for number in other.peer.numbers for key in policy.of(number))
        for key in (*policy.anybody(), *own, *named):
            if key.protocol == protocol:
                begins |= {key.port, key.port + (1 << FULL_PORT - key.bits)}
    starts = sorted(each for each in begins if each <= last)
    held: tuple[int, int, tuple[Reason, ...]] | None = None
    for start, following in zip(starts, [*starts[1:], last + 1], strict=True):
        reasons = _reasons(sides, protocol, start)
        if held is not None and _same(held[2], reasons):
            held = held[0], following - 1, held[2]
            continue
        if held is not None:
            yield held
        held = start, following - 1, reasons
    if held is not None:
        yield held


def _same(one: Sequence[Reason], other: Sequence[Reason]) -> bool:
    """Whether packets fare the same by the same rules, and the same rules come near."""
    return [(each.match.verdict, each.origins, each.requests, each.near) for each in one] == [
        (each.match.verdict, each.origins, each.requests, each.near) for each in other
    ]


def port_text(port: int, protocol: int) -> str:
    """``80/TCP``."""
    names = {number: name for name, number in PROTOCOLS.items()}
    return f"{port}/{names.get(protocol, protocol)}"


# The headline


def headline(ways: Sequence[Way], here: str = "here") -> tuple[Verdict, str]:
    """The worst verdict, and one line that is true of all ways; ``here``: where the decided side is."""
    groups: dict[str, list[Way]] = {}
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
    return verdict, "; ".join(f"{words} {_of(some, ways)}" for words, some in groups.items())


def _rank(way: Way) -> tuple[bool, int]:
    """Ports that are named come first, and of all the worst."""
    return way.port == OTHER, ("denied", "elsewhere", "allowed").index(way.verdict)


def _words(way: Way, here: str) -> str:
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


def _of(some: Sequence[Way], every: Sequence[Way]) -> str:
    """Which of the ways these are, in words."""
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
