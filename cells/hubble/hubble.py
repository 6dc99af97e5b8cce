"""The cell's hooks: Hubble, which fills the ring of events, and the notifications for monitor clients.

Hubble's other modules are imported only if enable-hubble is true.

Source: Cilium 1.17, options ``enable-hubble`` and ``hubble-*``.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import anyio.lowlevel
import msgspec
from msgspec import Meta

from cells.cluster.identity.identities import Identity
from cells.cluster.ipcache import Ipcache
from cells.config import AgentConfig
from cells.endpoint import Endpoint
from cells.kubernetes.objects.core import Node, Pod
from cells.observe.events import AgentNotification, Events
from cells.observe.health import AgentReady
from cells.observe.monitor import MonitorClient
from cells.policy.control import PolicyObject, PolicyView
from cells.policy.maps import RealizedPolicy
from cells.proxy.dns import NameStore
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from lifecycle import Change, Jobs, ReadTable, Settings, Table, after

if TYPE_CHECKING:
    from cells.hubble.notifications import Notification, Notified
    from cells.hubble.observer import FlowObserver
    from cells.hubble.sources import EventSources


NOTIFICATION_BATCH: Final = 256
"""Maximum number of notifications before the monitor's clients get to send."""
MONITOR_EVENTS: Final = {
    "drop": 1,
    "debug": 2,
    "capture": 3,
    "trace": 4,
    "policy-verdict": 5,
    "recorder": 6,
    "trace-sock": 7,
    "l7": 129,
    "agent": 130,
}
"""Monitor message types, by their names in ``hubble-monitor-events``."""


def check_capacity(capacity: int) -> None:
    """Raise ValueError unless the capacity of the ring is 2^n - 1 with n from 1 to 16."""
    if capacity > 0xFFFF:
        raise ValueError(f"invalid capacity: too large: {capacity}")
    if capacity < 1 or capacity & (capacity + 1):
        raise ValueError(f"invalid capacity: must be one less than an integer power of two: {capacity}")


class HubbleSettings(Settings, frozen=True):
    """Flows of this node: packets, requests and lookups, with the names of both sides."""

    enable_hubble: bool = False
    """Keep the node's flows, and serve them to hubble and its relay."""

    hubble_event_buffer_capacity: int = 4095
    """Events that the ring holds: one less than a power of two, 65535 at most."""

    hubble_event_queue_size: Annotated[int, Meta(ge=0)] = 0
    """Events that wait to be taken in before further ones are lost; 0: 1024 for each processor, at most
    16384."""

    hubble_monitor_events: tuple[str, ...] = ()
    """Kinds of events that the ring takes: drop, debug, capture, trace, policy-verdict, trace-sock, l7,
    agent; none named: all."""

    hubble_skip_unknown_cgroup_ids: bool = True
    """Pass over socket traces of processes that are in no pod."""

    hubble_redact_enabled: bool = False
    """Hide parts of HTTP and Kafka requests, as the options hubble-redact-* say."""

    hubble_redact_http_urlquery: bool = False
    """Hide the query and the fragment of URLs."""

    hubble_redact_http_userinfo: bool = True
    """Hide passwords in URLs, also where hubble-redact-enabled is false."""

    hubble_redact_http_headers_allow: tuple[str, ...] = ()
    """Headers shown with their values; the values of all others are hidden."""

    hubble_redact_http_headers_deny: tuple[str, ...] = ()
    """Headers shown without their values; with neither list the values of all are hidden."""

    hubble_redact_kafka_apikey: bool = False
    """Hide the API key of Kafka requests."""

    def faults(self) -> Iterator[str]:
        try:
            check_capacity(self.hubble_event_buffer_capacity)
        except ValueError as error:
            yield f"hubble-event-buffer-capacity: {error}"
        for name in self.hubble_monitor_events:
            if name not in MONITOR_EVENTS:
                known = ", ".join(MONITOR_EVENTS)
                yield f"hubble-monitor-events: unknown monitor event type: {name}, expected some of {known}"
        if self.hubble_redact_http_headers_allow and self.hubble_redact_http_headers_deny:
            yield "hubble-redact-http-headers-allow and -deny: only one of them may be set"


class KnownNames(msgspec.Struct, frozen=True):
    """The agent's tables from which the resolver gets names for flows."""

    endpoints: Table[int, Endpoint]
    identities: Table[int, Identity]
    ipcache: Ipcache
    pods: Table[tuple[str, str], Pod]
    names: NameStore
    policies: PolicyView | None


class FollowedTables(msgspec.Struct, frozen=True):
    """The agent's tables for which changes become agent events."""

    endpoints: Table[int, Endpoint]
    realized: Table[int, RealizedPolicy]
    ipcache: Ipcache
    services: Table[FrontendKey, ServedFrontend]
    policies: Table[tuple[str, str, str], PolicyObject] | None
    nodes: Table[tuple[str, str], Node]


class Hubble:
    """Fills the ring with this node's events while the agent runs, if enable-hubble is true."""

    def __init__(
        self,
        settings: HubbleSettings,
        agent: AgentConfig,
        events: Events,
        known: KnownNames,
        followed: FollowedTables,
        *,
        jobs: Jobs,
    ) -> None:
        self._sources: EventSources | None = None
        if not settings.enable_hubble:
            return
        from cells.hubble.sources import EventSources, origin_of, queue_size

        sources = self._sources = EventSources(settings, known, origin_of(agent))
        self._events = events
        self._queue_size = queue_size(settings)
        jobs.one_shot("take in events", self._take)
        jobs.observe("services", followed.services.changes, sources.frontends)
        jobs.observe("endpoints", followed.endpoints.changes, sources.endpoints)
        jobs.observe("policies of endpoints", followed.realized.changes, sources.realized)
        jobs.observe("ipcache", followed.ipcache.table.changes, sources.prefixes)
        jobs.observe("labels of the node", followed.nodes.changes, sources.nodes)
        if followed.policies is not None:
            jobs.observe("policies", followed.policies.changes, sources.policies)

    @property
    def observer(self) -> FlowObserver | None:
        """The observer, which answers queries; None if enable-hubble is false."""
        return self._sources.observer if self._sources is not None else None

    async def _take(self) -> None:
        """Process events until the agent stops. Raises HiveError if there are no perf buffers."""
        if self._sources is not None:
            await self._sources.run(self._events, self._queue_size)


@after(AgentReady)
class AgentNotifications:
    """Publishes agent notifications to clients of the monitor socket; watches tables only for clients.

    Hubble creates its own notifications from the same tables, from the agent's start on.
    """

    def __init__(
        self,
        clients: Table[int, MonitorClient],
        events: Events,
        followed: FollowedTables,
        policies: PolicyView | None,
        *,
        jobs: Jobs,
    ) -> None:
        self._clients = clients
        self._events = events
        self._followed = followed
        self._policies = policies
        jobs.one_shot("notify monitors", self._run)

    async def _run(self) -> None:
        if self._clients.all():
            from cells.hubble.notifications import started

            self._publish(*started())
        async with anyio.create_task_group() as tasks:
            following: anyio.CancelScope | None = None
            async for _ in self._clients.changes():
                watched = bool(self._clients.all())
                if watched and following is None:
                    following = anyio.CancelScope()
                    tasks.start_soon(self._follow, following)
                elif following is not None and not watched:
                    following.cancel()
                    following = None

    async def _follow(self, scope: anyio.CancelScope) -> None:
        """Publish changes of the tables until the scope is cancelled; initial rows are skipped."""
        from cells.hubble import notifications as n

        of, policies = self._followed, self._policies
        with scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, _changes_from_now(of.services), n.of_frontends)
                tasks.start_soon(self._watch, _changes_from_now(of.endpoints), n.of_endpoints)
                realized = partial(n.of_realized, endpoints=of.endpoints)
                tasks.start_soon(self._watch, _changes_from_now(of.realized), realized)
                tasks.start_soon(self._watch, _changes_from_now(of.ipcache.table), n.of_prefixes)
                if of.policies is not None and policies is not None:
                    policy_notifications = n.PolicyNotifications(policies, of.policies.all())
                    tasks.start_soon(self._watch, _changes_from_now(of.policies), policy_notifications.of)

    async def _watch(
        self,
        changes: AsyncIterable[list[Change[Any, Any]]],
        to_notifications: Callable[[list[Change[Any, Any]]], Iterator[Notified]],
    ) -> None:
        async for batch in changes:
            for start in range(0, len(batch), NOTIFICATION_BATCH):
                for one in to_notifications(batch[start : start + NOTIFICATION_BATCH]):
                    self._publish(*one)
                await anyio.lowlevel.checkpoint()  # lets clients drain their queues, which would overflow

    def _publish(self, kind: int, body: Notification) -> None:
        text = msgspec.json.encode(body).decode()
        self._events.publish(AgentNotification(kind, text).data)


def _changes_from_now(table: ReadTable[Any, Any]) -> AsyncIterable[list[Change[Any, Any]]]:
    """Watch a table without its initial rows."""
    return table.changes(since=table.revision)
