"""Operations on the agent itself: health, metrics, hive graph, settings, tables and event history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec

from cells.api.health import health_state
from cells.api.models import Metric
from cells.api.models.hive import EventLine, Failure, LoopLoad, NamesThen, RingState, Setting, Settings
from cells.api.operations import ApiPart, Route
from cells.api.operations import status as status_mapping
from cells.api.operations.status import StatusSummary
from cells.api.wire import JSON, answer, json_answer, parse_bool, parse_int
from cells.base.metrics import Histogram, MetricFamily
from cells.config.drift import ConfigDrift
from cells.health import ProbeResponder
from cells.hubble.hubble import Hubble
from cells.observe.events import Lost
from cells.observe.health import StatusCollector
from cells.observe.metrics import Metrics
from lifecycle import HiveView, Member, ReadTable, Tables
from lifecycle.admin import Follower, rows, tables_info
from lifecycle.http import Request, Response
from lifecycle.process import BOUNDS, LoopLag
from lifecycle.tables import snapshot

if TYPE_CHECKING:  # imported only if Hubble is enabled
    from cells.hubble.flow import Flow
    from cells.hubble.observer import FlowObserver, SeenRecord

# The agent's metrics as JSON, for ``cilium-dbg metrics list`` up to 1.16.
#
# Source: Cilium's OpenAPI document, GET /metrics/; the value of a histogram is its sum.


class MetricsList:
    """Lists all metrics, independent of the port for Prometheus."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def get(self, _request: Request) -> Response:
        """GET /metrics and /metrics/."""
        families = sorted(await self._metrics.families(), key=lambda family: family.name)
        return answer(200, [metric for family in families for metric in _metrics(family)])


def _metrics(family: MetricFamily) -> list[Metric]:
    return [
        Metric(
            name=family.name,
            value=value.sum if isinstance(value, Histogram) else float(value),
            labels=dict(zip(family.labels, labels, strict=True)),
        )
        for labels, value in sorted(family.series.items())
    ]


# GET /healthz.


class StatusOperations:
    """GET /healthz and the metrics."""

    def __init__(
        self,
        collector: StatusCollector,
        facts: StatusSummary,
        metrics: MetricsList,
        responder: ProbeResponder | None,
    ) -> None:
        self._collector = collector
        self._facts = facts
        self._responder = responder
        self._metrics = metrics
        self._models = status_mapping.StatusModels()

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/healthz", self.get_healthz),
            Route("GET", "/v1/metrics", self._metrics.get),
            Route("GET", "/v1/metrics/", self._metrics.get),
        ]

    async def get_healthz(self, request: Request) -> Response:
        """GET /healthz: always 200; the health is in the body."""
        status = self._collector.status()
        if parse_bool(request.headers.get("brief"), default=False):
            health = health_state(self._responder)
            return answer(200, status_mapping.brief_response(status, health, *self._facts.version()))
        return answer(200, status_mapping.status_response(status, self._facts.status(), self._models))


def part(operations: StatusOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("status", operations.routes())


# Graph, start, settings and load, for ``hive inspect --live``, ``--timeline`` and ``hive config``.
# The paths are outside /v1, which is Cilium's document. Schemas: docs/reference/graph-schema.json and
# docs/reference/timeline-schema.json.


class Inspection:
    """Read-only view of the hive's graph, start-up and settings."""

    def __init__(self, view: HiveView, drift: ConfigDrift) -> None:
        self._view = view
        self._drift = drift

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/hive/graph", self.get_graph),
            Route("GET", "/hive/timeline", self.get_timeline),
            Route("GET", "/hive/loop", self.get_loop),
            Route("GET", "/hive/config", self.get_config),
        ]

    async def get_graph(self, _request: Request) -> Response:
        """GET /hive/graph."""
        return json_answer(await anyio.to_thread.run_sync(lambda: self._view.graph().json()))

    async def get_timeline(self, _request: Request) -> Response:
        """GET /hive/timeline: the start-up; complete for hooks that have started."""
        return json_answer(
            await anyio.to_thread.run_sync(lambda: self._view.timeline(self._view.graph()).json())
        )

    async def get_config(self, _request: Request) -> Response:
        """GET /hive/config: every setting in force, and what a restart would change."""
        settings = [
            Setting(name=one.option.name, value=one.text, origin=one.origin) for one in self._drift.settings()
        ]
        return answer(
            200, Settings(places=self._drift.watched, settings=settings, changes=self._drift.changes)
        )

    async def get_loop(self, _request: Request) -> Response:
        """GET /hive/loop: load of the event loop; 404 if the hive did not create it."""
        lag = LoopLag.of(asyncio.get_running_loop())
        if lag is None:
            return answer(404, Failure(err="this event loop is not measured"))
        histogram = lag.histogram
        return answer(
            200,
            LoopLoad(
                bounds=BOUNDS,
                counts=histogram.counts,
                longest=lag.longest,
                p99=histogram.within(0.99),
                p99_9=histogram.within(0.999),
            ),
        )


def inspection_part(inspection: Inspection) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("inspection", inspection.routes())


# Tables: list, dump and watch.
#
# Source: the paths and ``{rev, obj}`` of spec api.md §8; ``key``, ``deleted`` and /statedb/tables are ours.
#         Read only; outside /v1, which is Cilium's document.

KEEPALIVE = 30.0
"""Seconds without output after which a stream sends an empty line, to detect disconnected clients."""


class StateDB:
    """Dumps and watches the agent's tables, in the form of the shell (lifecycle.admin)."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._follower = Follower()

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/statedb/tables", self.list_tables),
            Route("GET", "/statedb/dump", self.dump_all),
            Route("GET", "/statedb/dump/{table}", self.dump),
            Route("GET", "/statedb/changes/{table}", self.changes),
        ]

    async def list_tables(self, _request: Request) -> Response:
        """GET /statedb/tables: name, size and pending initializers of each table."""
        return answer(200, tables_info(self._tables))

    async def dump_all(self, _request: Request) -> Response:
        """GET /statedb/dump: all rows of all tables, by table name."""
        return self._dump(*self._tables.all())

    async def dump(self, request: Request) -> Response:
        """GET /statedb/dump/{table}: all rows of one table, under its name; 404 for an unknown table."""
        try:
            table = self._tables.get(request.match_info["table"])
        except LookupError as error:
            return answer(404, Failure(err=str(error)))
        return self._dump(table)

    async def changes(self, request: Request) -> Response:
        """GET /statedb/changes/{table}: a line of JSON per current row, then per change.

        The response is endless, with empty lines as keep-alive; after an error, its last line is ``{"err":
        ..}``.
        """
        try:
            table = self._tables.get(request.match_info["table"])
        except LookupError as error:
            return answer(404, Failure(err=str(error)))
        return Response(200, self._lines(table), JSON)

    def open(self) -> None:
        """Allow streams, when the server starts."""
        self._follower.open()

    def close(self) -> None:
        """End the streams, when the server stops."""
        self._follower.close()

    def _dump(self, *tables: ReadTable[Any, Any]) -> Response:
        """Yield a JSON object with the rows of each table from one snapshot, in slices."""
        rows_by_table = snapshot(*tables)

        async def parts() -> AsyncGenerator[bytes, None]:
            before = b"{"
            for table in tables:
                yield before + msgspec.json.encode(table.name) + b":["
                comma = b""
                async with aclosing(rows(rows_by_table[table])) as slices:
                    async for tables_part in slices:
                        yield comma + b",".join(map(msgspec.json.encode, tables_part))
                        comma = b","
                yield b"]"
                before = b","
            yield b"}" if tables else b"{}"

        return Response(200, parts(), JSON)

    async def _lines(self, table: ReadTable[Any, Any]) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._follower.follow(table, KEEPALIVE)) as batches:
                async for batch in batches:
                    yield b"".join(msgspec.json.encode(one) + b"\n" for one in batch) or b"\n"
        except Exception as error:  # noqa: BLE001  # a derived table may fail; the client gets the error
            yield msgspec.json.encode(Failure(err=f"{type(error).__name__}: {error}")) + b"\n"


# Stored events, then new ones, for ``hive monitor --since`` and ``--last``.

NO_EVENTS = (
    "the agent keeps no past events: set enable-hubble=true (chart: hubble.enabled), and restart it; without"
    " --since and --last those that come are shown"
)


class EventHistory:
    """Streams the undecoded records of Hubble's ring; requests are redacted as in Hubble."""

    def __init__(self, hubble: Hubble | None) -> None:
        self._observer = hubble.observer if hubble is not None else None
        self._closed = False

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [Route("GET", "/hive/events", self.events)]

    async def events(self, request: Request) -> Response:
        """GET /hive/events: a line of JSON per event, endless, with empty lines as keep-alive."""
        if (observer := self._observer) is None:
            return answer(404, Failure(err=NO_EVENTS))
        since = parse_int(request.query.get("since"), "since")
        named = parse_bool(request.query.get("names"), default=True)
        return Response(200, self._lines(observer, since, named=named), JSON)

    def open(self) -> None:
        """Allow streams, when the server starts."""
        self._closed = False

    def close(self) -> None:
        """End the streams, when the server stops."""
        self._closed = True
        if self._observer is not None:
            self._observer.wake()

    async def _lines(self, observer: FlowObserver, since: int, *, named: bool) -> AsyncGenerator[bytes, None]:
        ring = observer.ring
        begins = ring.time_of(ring.begin) if ring.end else None
        yield _line(
            EventLine(history=RingState(begins=begins, held=ring.end - ring.begin, capacity=ring.capacity))
        )
        past = True
        async with aclosing(observer.records(since, named=named)) as batches:
            async for batch in batches:
                if batch:
                    yield b"".join(map(_line, map(_event_line, batch)))
                else:
                    yield _line(EventLine(live=True)) if past else b"\n"
                    past = False
                if self._closed:
                    return


def _line(line: EventLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _event_line(seen: SeenRecord) -> EventLine:
    record = seen.record
    if isinstance(record, Lost):
        return EventLine(time=seen.time, lost=record.count, cpu=record.cpu)
    names = _names_then(seen.flow) if seen.flow is not None else None
    return EventLine(time=seen.time, data=record.data, cpu=record.cpu, names=names)


def _names_then(flow: Flow) -> NamesThen:
    endpoints, pods, services, identities = {}, {}, {}, {}
    ips = ("", "") if flow.IP is None else (flow.IP.source, flow.IP.destination)
    ends = zip(
        (flow.source, flow.destination), ips, (flow.source_service, flow.destination_service), strict=True
    )
    for end, ip, service in ends:
        pod = f"{end.namespace}/{end.pod_name}" if end is not None and end.pod_name else ""
        if pod and ip:
            pods[ip] = pod
        elif ip and service is not None and service.name:
            services[ip] = f"{service.namespace}/{service.name}"
        if end is not None and end.ID and pod:
            endpoints[end.ID] = pod
        if end is not None and end.identity and end.labels:
            identities[end.identity] = end.labels
    return NamesThen(endpoints=endpoints, pods=pods, services=services, identities=identities)


def events_part(history: EventHistory) -> Member[ApiPart]:
    """Provide the operation."""
    return ApiPart("events", history.routes(), history.open, history.close)


def tables_part(tables: StateDB) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("tables", tables.routes(), tables.open, tables.close)
