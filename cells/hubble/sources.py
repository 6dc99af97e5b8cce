"""Where events come from: the datapath and the proxies by way of Events, and the agent's tables.

Source: Cilium 1.17, pkg/hubble/monitor and pkg/monitor/agent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from cells.cluster.ipcache.rows import IpcacheEntry
from cells.config import AgentConfig
from cells.endpoint import Endpoint
from cells.hubble.enums import LostEventSource
from cells.hubble.flow import LostEvent
from cells.hubble.hubble import MONITOR_EVENTS, HubbleSettings, KnownNames
from cells.hubble.moments import FrontendIndex, Moment, Moments
from cells.hubble.parser import EventError, FlowOrigin, Parser, Stamp
from cells.hubble.parser import node_events as agent
from cells.hubble.parser.l7 import ACCESS_LOG, L7Parser, Redaction, access_log_record
from cells.hubble.ring import FlowObserver
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
"""Of Hubble's interfaces, in the words of Cilium's servers."""
DEFAULT_CLUSTER: Final = "default"
AGENT: Final = MONITOR_EVENTS["agent"]
_QUEUE_FOR_CPU: Final = 1024
_LONGEST_QUEUE: Final = 16384


def queue_size(settings: HubbleSettings) -> int:
    """How many events wait to be taken in."""
    return settings.hubble_event_queue_size or min(_QUEUE_FOR_CPU * (os.cpu_count() or 1), _LONGEST_QUEUE)


def origin_of(config: AgentConfig) -> FlowOrigin:
    """What flows of this node have; its labels come with the Node object."""
    name, cluster = config.node_name, config.cluster_name
    return FlowOrigin(name if cluster == DEFAULT_CLUSTER else f"{cluster}/{name}")


class EventSources:
    """Fills an observer's ring with what it is given."""

    def __init__(self, settings: HubbleSettings, tables: KnownNames, origin: FlowOrigin) -> None:
        self._policies = tables.policies
        self._origin = origin
        self._node_name = origin.node_name.rpartition("/")[2]
        parser = Parser(origin, skip_unknown_cgroup_ids=settings.hubble_skip_unknown_cgroup_ids)
        self.observer = FlowObserver(settings.hubble_event_buffer_capacity, origin, parser, VERSION)
        self._frontends = FrontendIndex()
        self._moments = Moments(tables, self._frontends, parser)
        self._l7 = L7Parser(origin, _redaction(settings))
        kinds = {MONITOR_EVENTS[name] for name in settings.hubble_monitor_events}
        self._kinds = frozenset(kinds or MONITOR_EVENTS.values())
        if AGENT in kinds:  # access logs are events of the agent
            self._kinds |= {ACCESS_LOG}

    async def run(self, events: Events, room: int) -> None:
        """Take in events, of which up to `room` wait, until the agent stops.

        Raises HiveError if the kernel gives no buffers.
        """
        with events.subscribe(room) as subscription:
            self._report(agent.START, agent.AgentStarted(time=datetime.now(UTC).isoformat()))
            async for batch in subscription:
                self.take(batch)

    def take(self, batch: Iterable[Sample | Lost]) -> None:
        """Take in what the datapath and the proxies reported."""
        now = time.time_ns()
        moments, kinds = self._moments, self._kinds
        moments.refresh()
        records: list[tuple[Sample, Moment]] = []
        for each in batch:
            if isinstance(each, Lost):
                self.observer.add(records, now)
                records = []
                self.observer.add_event(_lost(each), now)
                continue
            kind = each.data[0] if each.data else 0
            if kind not in kinds:
                continue
            if kind == ACCESS_LOG:
                self.observer.add(records, now)
                records = []
                self._take_request(each, now)
            else:
                records.append((each, moments.of(each)))
        self.observer.add(records, now)

    def _take_request(self, sample: Sample, now: int) -> None:
        record = decode(sample.data)
        if not isinstance(record, RequestRecord | LookupRecord):
            return
        stamp = Stamp(now, self.observer.ring.next_uuid())
        try:
            flow = self._l7.read(access_log_record(record), stamp, self._moments.now)
        except EventError:
            return
        if isinstance(record, RequestRecord) and (shown := self._l7.redacted(record)) != record:
            sample = Sample(sample.cpu, request_sample(shown))
        self.observer.add_event(flow, now, sample)

    def _report(self, kind: int, notification: object) -> None:
        if AGENT in self._kinds:
            self.observer.add_event(agent.agent_event(kind, notification), time.time_ns())

    async def frontends(self, changes: list[Change[FrontendKey, ServedFrontend]]) -> None:
        """Frontends that are in the maps came, changed or went."""
        self._frontends.follow(changes)
        for change in changes:
            row = change.row
            if row is None:
                number = change.old.id if change.old is not None else 0
                self._report(agent.SERVICE_DELETED, agent.ServiceDeleted(id=number))
                continue
            frontend = row.shown
            address = frontend.key.address
            self._report(
                agent.SERVICE_UPSERTED,
                agent.ServiceUpserted(
                    id=row.id,
                    frontend_address=agent.AddressPort(str(address.ip), address.port),
                    backend_addresses=[
                        agent.AddressPort(str(one.address.ip), one.address.port) for one in frontend.backends
                    ],
                    type=frontend.type.text,
                    ext_traffic_policy="Local" if frontend.ext_local else "Cluster",
                    int_traffic_policy="Local" if frontend.int_local else "Cluster",
                    name=frontend.service.name,
                    namespace=frontend.service.namespace,
                ),
            )

    async def endpoints(self, changes: list[Change[int, Endpoint]]) -> None:
        """Endpoints were created or deleted."""
        for change in changes:
            row = change.row or change.old
            if row is None or (change.old is not None and change.row is not None):
                continue
            self._report(
                agent.ENDPOINT_DELETED if change.deleted else agent.ENDPOINT_CREATED,
                agent.EndpointChanged(
                    id=row.id, labels=row.labels, pod_name=row.pod_name, namespace=row.pod_namespace
                ),
            )

    async def realized(self, changes: list[Change[int, RealizedPolicy]]) -> None:
        """Policy maps of endpoints follow their rules, or do not."""
        for change in changes:
            row, old = change.row, change.old
            if row is None or (old is not None and (row.revision, row.error) == (old.revision, old.error)):
                continue
            endpoint = self._moments.now.endpoint(row.endpoint_id)
            self._report(
                agent.REGENERATION_FAILED if row.error else agent.REGENERATED,
                agent.EndpointRegenerated(
                    id=row.endpoint_id,
                    labels=endpoint.labels if endpoint is not None else None,
                    error=row.error,
                ),
            )

    async def prefixes(self, changes: list[Change[str, IpcacheEntry]]) -> None:
        """Prefixes have another identity, or none."""
        for change in changes:
            row, old = change.row or change.old, change.old
            if row is None:
                continue
            namespace, pod_name = row.pod or ("", "")
            self._report(
                agent.IPCACHE_DELETED if change.deleted else agent.IPCACHE_UPSERTED,
                agent.PrefixChanged(
                    cidr=row.prefix,
                    id=row.identity,
                    old_id=old.identity if old is not None and not change.deleted else None,
                    host_ip=_host(row),
                    old_host_ip=_host(old) if old is not None and not change.deleted else "",
                    encrypt_key=row.encrypt_key,
                    namespace=namespace,
                    pod_name=pod_name,
                ),
            )

    async def nodes(self, changes: list[Change[tuple[str, str], Node]]) -> None:
        """Nodes have other labels, of which those of this one are shown."""
        for change in changes:
            if change.key == ("", self._node_name):
                labels = change.row.labels if change.row is not None else {}
                self._origin.node_labels = tuple(sorted(f"{key}={value}" for key, value in labels.items()))

    async def policies(self, changes: list[Change[tuple[str, str, str], PolicyObject]]) -> None:
        """Policy objects are in force, or were deleted."""
        if (view := self._policies) is None:
            return
        for change in changes:
            row = change.row or change.old
            if row is None or row.refused:
                continue
            rules = [] if change.deleted else view.labels_of(row.kind, row.namespace, row.name)
            labels = sorted({label for rule in rules for label in rule})
            self._report(
                agent.POLICY_DELETED if change.deleted else agent.POLICY_UPDATED,
                agent.PolicyChanged(labels=labels, revision=view.revision, rule_count=len(rules)),
            )


def _host(row: IpcacheEntry) -> str:
    """The node to tunnel to; empty where there is none."""
    return str(row.tunnel_endpoint) if int(row.tunnel_endpoint) else ""


def _lost(event: Lost) -> LostEvent:
    """Of a CPU's buffer, or of the queue in front of the ring."""
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
