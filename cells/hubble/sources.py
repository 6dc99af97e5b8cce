"""Fills Hubble's ring with datapath records, access logs of the proxies, and agent events from tables.

``Hubble`` runs EventSources while the agent runs; ``FlowObserver`` stores the events.

Source: Cilium 1.17, pkg/hubble/monitor and pkg/monitor/agent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final

from cells.cluster.ipcache.rows import IpcacheEntry
from cells.config import AgentConfig
from cells.endpoint import Endpoint
from cells.hubble import notifications
from cells.hubble.enums import LostEventSource
from cells.hubble.flow import LostEvent
from cells.hubble.hubble import MONITOR_EVENTS, HubbleSettings, KnownNames
from cells.hubble.observer import FlowObserver
from cells.hubble.parser import EventError, FlowOrigin, Parser, Stamp
from cells.hubble.parser.l7 import ACCESS_LOG, L7Parser, Redaction, access_log_record
from cells.hubble.parser.node_events import agent_event
from cells.hubble.resolvers import FrontendIndex, ResolverSnapshots, SnapshotResolver
from cells.kubernetes.objects.core import Node
from cells.observe.events import (
    Events,
    LookupRecord,
    Lost,
    RequestRecord,
    Sample,
    decode,
    request_sample,
)
from cells.policy.control import PolicyObject
from cells.policy.maps import RealizedPolicy
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from lifecycle import Change

VERSION: Final = "cilium v1.17.0"
"""Version of Hubble's API, as Cilium's ServerStatus reports it."""
DEFAULT_CLUSTER: Final = "default"
AGENT: Final = MONITOR_EVENTS["agent"]
_QUEUE_FOR_CPU: Final = 1024
_LONGEST_QUEUE: Final = 16384


def queue_size(settings: HubbleSettings) -> int:
    """Return the maximum number of unprocessed events."""
    return settings.hubble_event_queue_size or min(_QUEUE_FOR_CPU * (os.cpu_count() or 1), _LONGEST_QUEUE)


def origin_of(config: AgentConfig) -> FlowOrigin:
    """Return the fields that all flows of this node share; EventSources.nodes sets the node labels."""
    name, cluster = config.node_name, config.cluster_name
    return FlowOrigin(name if cluster == DEFAULT_CLUSTER else f"{cluster}/{name}")


class EventSources:
    """Converts monitor events and table changes to Hubble events and adds them to the ring."""

    def __init__(self, settings: HubbleSettings, tables: KnownNames, origin: FlowOrigin) -> None:
        self._policies = None
        if tables.policies is not None:
            self._policies = notifications.PolicyNotifications(tables.policies)
        self._endpoints = tables.endpoints
        self._origin = origin
        self._node_name = origin.node_name.rpartition("/")[2]
        parser = Parser(origin, skip_unknown_cgroup_ids=settings.hubble_skip_unknown_cgroup_ids)
        self.observer = FlowObserver(settings.hubble_event_buffer_capacity, origin, parser, VERSION)
        self._frontends = FrontendIndex()
        self._snapshots = ResolverSnapshots(tables, self._frontends, parser)
        self._l7 = L7Parser(origin, _redaction(settings))
        kinds = {MONITOR_EVENTS[name] for name in settings.hubble_monitor_events}
        self._kinds = frozenset(kinds or MONITOR_EVENTS.values())
        if AGENT in kinds:  # Cilium counts access logs as agent events
            self._kinds |= {ACCESS_LOG}

    async def run(self, events: Events, room: int) -> None:
        """Process events until the agent stops; at most `room` events are queued, later ones are lost.

        Raises HiveError if the kernel cannot provide the perf buffers.
        """
        with events.subscribe(room) as subscription:
            self._report([notifications.started()])
            async for batch in subscription:
                self.process(batch)

    def process(self, batch: Iterable[Sample | Lost]) -> None:
        """Add datapath records, access logs and losses to the ring."""
        now = time.time_ns()
        snapshots, kinds = self._snapshots, self._kinds
        snapshots.refresh()
        records: list[tuple[Sample, SnapshotResolver]] = []
        for each in batch:
            if isinstance(each, Lost):
                self.observer.add(records, now)
                records = []
                self.observer.add_event(_lost(each), now)
                continue
            kind = each.data[0] if each.data else 0
            if kind not in kinds or kind == AGENT:  # agent events are created from the tables
                continue
            if kind == ACCESS_LOG:
                self.observer.add(records, now)
                records = []
                self._take_request(each, now)
            else:
                records.append((each, snapshots.of(each)))
        self.observer.add(records, now)

    def _take_request(self, sample: Sample, now: int) -> None:
        record = decode(sample.data)
        if not isinstance(record, RequestRecord | LookupRecord):
            return
        stamp = Stamp(now, self.observer.ring.next_uuid())
        try:
            flow = self._l7.read(access_log_record(record), stamp, self._snapshots.current)
        except EventError:
            return
        if isinstance(record, RequestRecord) and (shown := self._l7.redacted(record)) != record:
            sample = Sample(sample.cpu, request_sample(shown))
        self.observer.add_event(flow, now, sample)

    def _report(self, notified: Iterable[notifications.Notified]) -> None:
        if AGENT in self._kinds:
            for kind, notification in notified:
                self.observer.add_event(agent_event(kind, notification), time.time_ns())

    async def frontends(self, changes: list[Change[FrontendKey, ServedFrontend]]) -> None:
        """Add service events for changed frontends, and update the index of services."""
        self._frontends.follow(changes)
        self._report(notifications.of_frontends(changes))

    async def endpoints(self, changes: list[Change[int, Endpoint]]) -> None:
        """Add events for created and deleted endpoints."""
        self._report(notifications.of_endpoints(changes))

    async def realized(self, changes: list[Change[int, RealizedPolicy]]) -> None:
        """Add events for regenerated endpoints, from changes of realized policies."""
        self._report(notifications.of_realized(changes, self._endpoints))

    async def prefixes(self, changes: list[Change[str, IpcacheEntry]]) -> None:
        """Add ipcache events for prefixes with a changed identity."""
        self._report(notifications.of_prefixes(changes))

    async def nodes(self, changes: list[Change[tuple[str, str], Node]]) -> None:
        """Update the node labels of flows if this node's row changed."""
        for change in changes:
            if change.key == ("", self._node_name):
                labels = change.row.labels if change.row is not None else {}
                self._origin.node_labels = tuple(sorted(f"{key}={value}" for key, value in labels.items()))

    async def policies(self, changes: list[Change[tuple[str, str, str], PolicyObject]]) -> None:
        """Add events for changed policy objects."""
        if self._policies is not None:
            self._report(self._policies.of(changes))


def _lost(event: Lost) -> LostEvent:
    """Convert a loss to a LostEvent: in the perf buffer of a CPU, or without a CPU in the queue."""
    source = LostEventSource.PERF_EVENT_RING_BUFFER
    if event.cpu is None:
        source = LostEventSource.OBSERVER_EVENTS_QUEUE
    return LostEvent(source=source, num_events_lost=event.count, cpu=event.cpu or 0)


def _redaction(settings: HubbleSettings) -> Redaction:
    return Redaction(
        enabled=settings.hubble_redact_enabled,
        url_query=settings.hubble_redact_http_urlquery,
        user_info=settings.hubble_redact_http_userinfo,
        kafka_api_key=settings.hubble_redact_kafka_apikey,
        headers_allow=frozenset(name.lower() for name in settings.hubble_redact_http_headers_allow),
        headers_deny=frozenset(name.lower() for name in settings.hubble_redact_http_headers_deny),
    )
