"""The start of a hive: durations of constructors and hooks, and which hooks waited for which."""

from collections import defaultdict

import msgspec

from lifecycle.graph.parts import Parts
from lifecycle.injection.profile import Profile, Step

__all__ = ["VERSION", "Span", "Timeline", "critical_path", "held_by", "read_timeline", "timeline_of"]

VERSION = 1
"""Version of the JSON form; increased when a field changes its meaning or is removed."""


class Span(msgspec.Struct, frozen=True):
    """One step of one node of the graph.

    Times are in seconds; `began` counts from the creation of the hive.
    """

    id: str
    """Id of the constructor, invoked function or hook."""
    kind: Step
    began: float
    took: float

    @property
    def ended(self) -> float:
        """When it ended."""
        return self.began + self.took


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All ended steps, in order of their ends. A hook without one has not started."""

    version: int = VERSION
    name: str
    spans: tuple[Span, ...]
    sums: dict[str, float] = {}
    """Seconds by name that the hive adds up, such as an agent's bootstrap scopes; some overlap."""

    def json(self) -> str:
        """Return one JSON object; timeline_schema() describes it."""
        return msgspec.json.encode(self).decode()

    def of(self, kind: Step) -> dict[str, Span]:
        """Return the steps of one kind by id; for a hook that started twice, the later one."""
        return {span.id: span for span in self.spans if span.kind == kind}


def timeline_of(graph: Parts, profile: Profile) -> Timeline:
    """Return the timings of `profile` with the ids of `graph`.

    Steps without a node in the graph are left out.
    """
    named = _names(graph)
    seen: dict[tuple[str, ...], int] = defaultdict(int)
    spans = []
    for timing in profile.timings:
        key = (timing.kind, timing.module, timing.owner, timing.name)
        if ids := named.get(key):  # steps of one name run in the order of the graph
            spans.append(Span(ids[seen[key] % len(ids)], timing.kind, timing.began, timing.took))
            seen[key] += 1
    return Timeline(name=graph.name, spans=tuple(spans), sums=dict(profile.sums))


def _names(graph: Parts) -> dict[tuple[str, ...], list[str]]:
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for node in graph.constructors:
        if node.built and not node.replaced:
            names["construct", node.module, "", node.name].append(node.id)
    for root in graph.invokes:
        names["invoke", root.module, "", root.name].append(root.id)
    owners = {node.id: node.name for node in graph.nodes}
    for hook in graph.hooks:
        owner = owners.get(hook.constructor, "")
        names["start", hook.module, owner, hook.name].append(hook.id)
        names["stop", hook.module, owner, hook.name].insert(0, hook.id)
    return names


def held_by(graph: Parts, timeline: Timeline) -> dict[str, str]:
    """For each hook that waited, the last to start of the hooks that it waited for."""
    started = timeline.of("start")
    blockers = {}
    for hook in graph.hooks:
        if over := [need for need in hook.after if need in started]:
            blockers[hook.id] = max(over, key=lambda need: started[need].ended)
    return blockers


def critical_path(graph: Parts, timeline: Timeline) -> list[str]:
    """Return the hooks that determined the duration of the start, each held by the one before."""
    started, blockers = timeline.of("start"), held_by(graph, timeline)
    if not started:
        return []
    path = [max(started, key=lambda hook: started[hook].ended)]
    while path[-1] in blockers:
        path.append(blockers[path[-1]])
    return path[::-1]


def read_timeline(data: bytes | str) -> Timeline:
    """Parse the JSON of Timeline.json(). Raises ValueError("one line") if it is invalid."""
    try:
        timeline = msgspec.json.decode(data, type=Timeline)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not a timeline ({error})") from None
    if timeline.version != VERSION:
        raise ValueError(f"it is a timeline of version {timeline.version}; this hive reads version {VERSION}")
    return timeline
