"""Kubernetes Events about objects that the agent cannot serve as specified.

Controller: the tables of the EventSources in, Event objects at the API server out; without one, nothing.
Why:    authors of a Service or a policy see its events, not the agents' logs. Many such
        objects must not burden the API server: there is one event per object and reason, written at most once
        a minute; an agent writes one per second; findings common to all agents are reported by three.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import time
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import anyio

from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.object_events import EventDraft, EventSource
from lifecycle import Change, Jobs, Logger, Member, ReadTable, invoke, module, provide

CONTROLLER: Final = "cilium.io/agent"
REPORTERS: Final = 3
"""Number of nodes that report a finding common to all nodes."""
PAUSE: Final = 60.0
"""Minimum time between two events about one object for one reason, in seconds."""
REPEAT: Final = 3600.0
"""Seconds until an event is repeated while its reason lasts: a server deletes events after an hour."""
RATE, BURST = 1.0, 20
"""Rate limit in events per second, and its burst."""
SHOWN: Final = 5
"""Maximum number of notes of one object in an event."""


class _Topic(NamedTuple):
    """The subject of an event: an object and a reason."""

    kind: str
    namespace: str
    name: str
    reason: str


class EventReports:
    """Reports the drafts of all sources. Drafts that cannot be written are logged and dropped."""

    def __init__(
        self,
        agent: AgentConfig,
        api: KubernetesAPI,
        sources: list[Member[EventSource]],
        nodes: ReadTable[str, ClusterNode],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._agent = agent
        self._api = api
        self._nodes = nodes
        self._log = log
        self._rows: dict[tuple[str, Hashable], list[EventDraft]] = {}
        self._topics: dict[_Topic, dict[EventDraft, int]] = {}
        """Present topics, with the number of their rows."""
        self._due: list[tuple[float, _Topic]] = []
        self._queued: dict[_Topic, float] = {}
        self._written: dict[_Topic, float] = {}
        """When a topic was last reported, in seconds of the monotonic clock."""
        self._wake = anyio.Event()
        for source in sources:
            jobs.observe(source.name, source.changes, partial(self._follow, source))
        jobs.one_shot("write", self._write)

    async def _follow(self, source: EventSource, changes: Sequence[Change[Any, Any]]) -> None:
        if not self._api.enabled:
            return
        for change in changes:
            key = (source.name, change.key)
            before = self._rows.pop(key, [])
            now = list(source.drafts(change.row)) if change.row is not None else []
            if now:
                self._rows[key] = now
            self._replace(before, now)

    def _replace(self, before: Iterable[EventDraft], now: Iterable[EventDraft]) -> None:
        changed = dict.fromkeys(map(_topic, now)) if list(before) != list(now) else {}
        for draft in now:
            held = self._topics.setdefault(_topic(draft), {})
            held[draft] = held.get(draft, 0) + 1
        for draft in before:
            topic = _topic(draft)
            held = self._topics[topic]
            held[draft] -= 1
            if not held[draft]:
                del held[draft]
            if not held:
                del self._topics[topic]
        for topic in changed:
            self._queue(topic, max(time.monotonic(), self._written.get(topic, -math.inf) + PAUSE))

    def _queue(self, topic: _Topic, at: float) -> None:
        if at < self._queued.get(topic, math.inf):
            self._queued[topic] = at
            heapq.heappush(self._due, (at, topic))
            self._wake.set()

    async def _write(self) -> None:
        if not self._api.enabled:
            return
        from cells.kubernetes.client.calls import Bucket
        from cells.kubernetes.client.errors import KubernetesError
        from cells.kubernetes.object_events import EventRecorder

        recorder = EventRecorder(self._api.client, CONTROLLER, self._agent.node_name)
        bucket = Bucket(RATE, BURST)
        while True:
            topic = await self._next()
            drafts = list(self._topics.get(topic, ()))
            if not drafts:
                self._written.pop(topic, None)
                continue
            self._written[topic] = time.monotonic()
            self._queue(topic, time.monotonic() + REPEAT)
            if all(one.shared for one in drafts) and not self._reports(topic):
                continue
            await bucket.take()
            await self._api.reachable()
            about, action = drafts[0].about, drafts[0].action
            try:
                await recorder.report(about, topic.reason, note_of(drafts), action=action, kind="Warning")
            except KubernetesError as error:
                self._log.warning(
                    "Kubernetes event not written", object=f"{topic.namespace}/{topic.name}", error=str(error)
                )

    async def _next(self) -> _Topic:
        """Wait for the first topic that is due."""
        while True:
            self._wake = anyio.Event()
            now = time.monotonic()
            while self._due and self._queued.get(self._due[0][1]) != self._due[0][0]:
                heapq.heappop(self._due)  # outdated: the topic was queued again for an earlier time
            if self._due and self._due[0][0] <= now:
                _, topic = heapq.heappop(self._due)
                del self._queued[topic]
                return topic
            with anyio.move_on_after(self._due[0][0] - now if self._due else math.inf):
                await self._wake.wait()

    def _reports(self, topic: _Topic) -> bool:
        """Whether this node is one of those that report a topic: from a hash of node name and topic."""

        def number(name: str) -> bytes:
            return hashlib.sha256("\0".join((name, *topic)).encode()).digest()

        own = number(self._agent.node_name)
        before = sum(number(node.name) < own for node in self._nodes.all() if not node.local)
        return before < REPORTERS


def _topic(draft: EventDraft) -> _Topic:
    about = draft.about
    return _Topic(about.kind.qualified, about.namespace, about.name, draft.reason)


def note_of(drafts: Iterable[EventDraft]) -> str:
    """All notes as one text, the first few if there are many."""
    notes = sorted({one.note for one in drafts})
    more = f"; and {len(notes) - SHOWN} more" if len(notes) > SHOWN else ""
    return "; ".join(notes[:SHOWN]) + more


cell = module(
    "kubernetes-events",
    "Events about objects that are not served",
    provide(EventReports),
    invoke(EventReports),
)
