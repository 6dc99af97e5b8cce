"""Explains connections between pods of any nodes, by the agents of both ends' nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from cells.policy.explain import (
    ANY_PORT,
    OTHER,
    PORTS,
    Explained,
    ExplainedConnection,
    ExplainedDirection,
    headline,
)
from cells.policy.explain.directory import POD, SERVICE
from hive.agents import AgentError

if TYPE_CHECKING:
    from hive.agents import Agents

Query = Mapping[str, str]
MOST_BACKENDS: Final = 32
"""Maximum number of destinations on other nodes that are queried."""
_PORTS = re.compile(r"(?P<ports>any port|(?P<first>\d+)(-(?P<last>\d+))?)/(?P<protocol>\w+)")
_FAMILY = re.compile(r" by IPv[46]$")


async def explain_on_all_nodes(agents: Agents, query: Query) -> Explained:
    """Explain a connection by the agents of both ends' nodes. Raises AgentError, KubernetesError.

    ``query``: source, destination, port and protocol, as for /hive/policy/explain. If one side does not
    answer, the verdict is ``elsewhere``, unless the other side denies.
    """
    source = await _node_of(agents, query.get("source", ""))
    target = await _node_of(agents, query.get("destination", ""))
    ends = [node for node in (source, target) if node]
    answers, problems = await _ask_first(agents, ends or list(await agents.pods()), query, every=not ends)
    if not answers:
        raise next((one for one in problems.values() if one.status == 400), next(iter(problems.values())))
    ways: list[ExplainedConnection] = []
    for (via, destination), ours in _by_destination(answers.values()).items():
        if len(ways) < MOST_BACKENDS and any(one.elsewhere for one in ours):
            question = dict(query)
            if via:
                question |= {"destination": f"{POD}{destination}", **_port_of(ours[0])}
            side = _missing(ours[0])
            node = source if side == "egress" else await _node_of(agents, destination)
            ways += await _with_other_side(agents, ours, question, side, node, problems)
        else:
            ways += ours
    verdict, words = headline(ways, f"on {next(iter(answers))}")
    notes = list(dict.fromkeys(note for one in answers.values() for note in one.notes))
    first = next(iter(answers.values()))
    return msgspec.structs.replace(
        first, verdict=verdict, allowed=verdict == "allowed", headline=words, ways=ways, notes=notes
    )


async def _ask(agents: Agents, node: str, query: Query) -> Explained:
    return msgspec.convert(await agents.ask(node, "explain", query), Explained)


async def _ask_first(
    agents: Agents, nodes: Sequence[str], query: Query, *, every: bool
) -> tuple[dict[str, Explained], dict[str, AgentError]]:
    """Return the answer of the first node that answers."""
    answers: dict[str, Explained] = {}
    problems: dict[str, AgentError] = {}
    for node in nodes:
        if answers and not every:
            break
        try:
            answers[node] = await _ask(agents, node, query)
        except AgentError as error:
            problems[node] = error
    if not nodes:
        problems[""] = AgentError("the cluster has no nodes")
    return answers, problems


async def _with_other_side(
    agents: Agents,
    ours: Sequence[ExplainedConnection],
    query: Query,
    side: str,
    node: str,
    problems: Mapping[str, AgentError],
) -> list[ExplainedConnection]:
    """Add the decisions of the other end's agent, or the error."""
    if not node:
        return list(ours)
    try:
        if node in problems:
            raise problems[node]
        found = await _ask(agents, node, query)
    except AgentError as error:
        unknown = (f"{side} is not known ({node}: {error})",)
        return [msgspec.structs.replace(one, elsewhere=unknown) for one in ours]
    return list(merged(ours, found.ways))


def _port_of(way: ExplainedConnection) -> dict[str, str]:
    """Return the port of a backend, which may differ from the service's."""
    port, _, protocol = way.port.partition("/")
    return {"port": port, "protocol": protocol} if port.isdigit() else {"port": "", "protocol": ""}


def _missing(way: ExplainedConnection) -> str:
    return "egress" if any(one.direction == "ingress" for one in way.directions) else "ingress"


def _by_destination(answers: Iterable[Explained]) -> dict[tuple[str, str], list[ExplainedConnection]]:
    """Group answers by frontend and destination; of several, the one with the most decisions."""
    found: dict[tuple[str, str], list[ExplainedConnection]] = {}
    for answer in answers:
        own: dict[tuple[str, str], list[ExplainedConnection]] = {}
        for way in answer.ways:
            own.setdefault((way.via, _FAMILY.sub("", way.destination)), []).append(way)
        for key, ways in own.items():
            if key not in found or not any(one.elsewhere for one in ways):
                found[key] = ways
    return found


async def _node_of(agents: Agents, text: str) -> str:
    """Return the node of a pod, by its name or address; empty for others."""
    text = text.removeprefix("reserved:")
    if text.startswith(SERVICE):
        return ""
    name = text.removeprefix(POD)
    try:
        found = await agents.pod_at(str(ip_address(name)))
    except ValueError:
        found = await agents.pod(name if "/" in name else f"default/{name}")
    spec = found["spec"] if found is not None else {}
    return "" if spec.get("hostNetwork") else str(spec.get("nodeName", ""))


# Merges both sides of a destination, port by port.


class _PortRange(NamedTuple):
    first: int
    last: int
    way: ExplainedConnection


class _ByPort(NamedTuple):
    """One side's answers by port."""

    named: Mapping[str, Sequence[_PortRange]]
    """Protocol -> ranges of ports with their answers."""
    others: ExplainedConnection | None
    """The answer for all other ports."""

    def at(self, protocol: str, port: int) -> ExplainedConnection | None:
        """Return the answer for a port."""
        named = self.named.get(protocol, ())
        return next((one.way for one in named if one.first <= port <= one.last), self.others)


def merged(
    ours: Sequence[ExplainedConnection], theirs: Sequence[ExplainedConnection]
) -> Iterator[ExplainedConnection]:
    """Merge the answers of both ends for one destination: a packet passes if both allow it."""
    families = sorted({_family(one) for one in (*ours, *theirs)} - {""}) or [""]
    for family in families:
        mine, other = (
            _by_port([one for one in side if _family(one) in ("", family)]) for side in (ours, theirs)
        )
        yield from _merged(mine, other, family)


def _merged(mine: _ByPort, other: _ByPort, family: str) -> Iterator[ExplainedConnection]:
    rest = _both(mine.others, other.others, family)
    alone = True
    for protocol, last in PORTS.items():
        ranges = [*mine.named.get(protocol, ()), *other.named.get(protocol, ())]
        starts = {0, *(one.first for one in ranges), *(one.last + 1 for one in ranges)}
        bounds = [*sorted(one for one in starts if one <= last), last + 1]
        open_at, held = 0, None
        for start, following in zip(bounds, [*bounds[1:], None], strict=True):
            way = None
            if following is not None and ranges:
                way = _both(mine.at(protocol, start), other.at(protocol, start), family)
            if held is not None and way != held:
                if held != rest:
                    alone = False
                    yield msgspec.structs.replace(held, port=_text(open_at, start - 1, protocol, last))
                held = None
            if held is None:
                open_at, held = start, way
    if rest is not None:
        yield msgspec.structs.replace(rest, port=ANY_PORT if alone else OTHER)


def _by_port(ways: Iterable[ExplainedConnection]) -> _ByPort:
    named: dict[str, list[_PortRange]] = {}
    others = None
    for way in ways:
        match = _PORTS.fullmatch(way.port)
        if match is None:
            others = way
            continue
        protocol = match["protocol"]
        first = int(match["first"] or 0)
        last = int(match["last"] or first) if match["first"] else PORTS.get(protocol, 65535)
        named.setdefault(protocol, []).append(_PortRange(first, last, way))
    return _ByPort(named, others)


def _both(
    mine: ExplainedConnection | None, other: ExplainedConnection | None, family: str
) -> ExplainedConnection | None:
    """Merge the answers of both ends for a port; None if one has none."""
    if mine is None or other is None:
        return None
    order = ("egress", "ingress")
    by_direction: dict[str, ExplainedDirection] = {
        one.direction: one for one in (*mine.directions, *other.directions)
    }
    directions = [by_direction[name] for name in order if name in by_direction]
    denied = bool(mine.problem or other.problem) or any(not one.allowed for one in directions)
    return ExplainedConnection(
        destination=_FAMILY.sub("", mine.destination) + family,
        port=OTHER,
        via=mine.via,
        verdict="denied" if denied else "allowed",
        directions=directions,
        elsewhere=(),
        problem=mine.problem or other.problem,
        note=mine.note or other.note,
    )


def _family(way: ExplainedConnection) -> str:
    match = _FAMILY.search(way.destination)
    return match[0] if match is not None else ""


def _text(first: int, last: int, protocol: str, end: int) -> str:
    if (first, last) == (0, end):
        return f"{ANY_PORT}/{protocol}"
    return f"{first if first == last else f'{first}-{last}'}/{protocol}"
