"""The agent's metrics, in Prometheus's text format at ``prometheus-serve-addr``.

Calls every cell's Collector at each scrape; without an address, nothing is served. Names, labels and defaults
are Cilium's, so that its dashboards and alerts continue to work.

A cell contributes a Collector, which imports the code for its families only when it is called:

    def ipam_metrics(ipam: Ipam) -> Member[Collector]:
        async def collect() -> Iterable[Family]:
            from cells.node.ipam import families

            return families(ipam)

        return Collector("ipam", collect)

Settings: prometheus-serve-addr, metrics.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio
import msgspec

from cells.base.metrics import Collector, MetricChoice, MetricFamily
from cells.config import AgentConfig
from lifecycle import (
    HealthTree,
    HiveError,
    Hook,
    JobMetrics,
    Lifecycle,
    Logger,
    Member,
    Profile,
    Settings,
    Tables,
    after,
    config,
    group,
    invoke,
    module,
    provide,
)
from lifecycle.process import CONTENT_TYPE, InconsistentError, exposition

if TYPE_CHECKING:
    from lifecycle.http import HttpServer, Request, Response

__all__ = [
    "Exposition",
    "ListenAddress",
    "MetricChoiceSettings",
    "Metrics",
    "MetricsProgram",
    "MetricsServer",
    "MetricsSettings",
    "cell",
    "choice_cell",
    "listen",
]


# Settings: the address of the server, and the choice of metrics.
#
# Source: Cilium 1.17, prometheus-serve-addr and metrics.


class ListenAddress(NamedTuple):
    """A listening address; without a host, all addresses of the node."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Parse ``host:port``, ``:port`` or ``[v6]:port``, as Go does. Raises ValueError("expected ...")."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError("expected host:port or :port, with a TCP port, 1 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MetricChoiceSettings(Settings, frozen=True):
    """The choice of metrics."""

    metrics: tuple[str, ...] = ()
    """Metrics to add to the usual ones (+name) or to leave out (-name), by full name; the last one wins."""


def metric_choice(settings: MetricChoiceSettings) -> MetricChoice:
    """Provide the choice; cells that measure only for some metrics read it, too."""
    return MetricChoice(settings.metrics)


class MetricsSettings(Settings, frozen=True):
    """Settings of the metrics cell."""

    prometheus_serve_addr: str = ""
    """Address to serve metrics on, such as :9962; empty: not served."""

    def validate(self) -> None:
        """Reject an invalid address. Raises ValueError with one line."""
        if self.prometheus_serve_addr:
            try:
                ListenAddress.parse(self.prometheus_serve_addr)
            except ValueError as error:
                raise ValueError(f"prometheus-serve-addr={self.prometheus_serve_addr}: {error}") from None

    @property
    def address(self) -> ListenAddress | None:
        """The address to serve at; None if metrics are not served."""
        return ListenAddress.parse(self.prometheus_serve_addr) if self.prometheus_serve_addr else None


# The collectors of metrics, called sequentially for each scrape.


class MetricsProgram(msgspec.Struct, frozen=True):
    """The prefix of metrics of the process; by default the agent's."""

    prefix: str = "cilium"
    """Prefix of the process's own metrics."""


class Metrics:
    """Collects all families that the settings enable; costs nothing between scrapes.

    Families of the process and the hive exist from the beginning, those of cells after their start.
    """

    def __init__(
        self,
        choice: MetricChoice,
        program: MetricsProgram | None = None,
        *,
        health: HealthTree,
        jobs: JobMetrics,
        profile: Profile,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._log = log
        self._choice = choice

        async def process() -> Iterable[MetricFamily]:
            from cells.observe.metrics.own import process_families

            return process_families((program or MetricsProgram()).prefix)

        async def framework() -> Iterable[MetricFamily]:
            from cells.observe.metrics.own import hive_families

            return hive_families(health, jobs, profile, tables)

        self._collectors = [Collector("process", process), Collector("hive", framework)]

    def warn_ignored_choices(self) -> None:
        """Log the parts of the setting ``metrics`` that have no effect."""
        for word in self._choice.unsigned:
            self._log.warning(
                f"--metrics flag contains value which does not start with + or -, '{word}', ignoring"
            )

    def add(self, collectors: Iterable[Collector]) -> None:
        """Add collectors."""
        self._collectors.extend(collectors)

    def remove(self, collectors: Iterable[Collector]) -> None:
        """Remove collectors."""
        for collector in collectors:
            self._collectors.remove(collector)

    def report(self, lifecycle: Lifecycle, collector: Collector) -> None:
        """Add a collector while the hive of this lifecycle runs, as an inner hive may stop earlier."""

        async def start() -> None:
            self.add([collector])

        async def stop() -> None:
            self.remove([collector])

        lifecycle.append(Hook("report metrics", start, stop))

    async def families(self) -> list[MetricFamily]:
        """Return the current values of all enabled families."""
        return [family for family in await self.all_families() if self._choice.serves(family)]

    async def all_families(self) -> list[MetricFamily]:
        """Return all families, enabled or not.

        If a collector fails, its error is logged and its families are missing.
        """
        found: list[MetricFamily] = []
        for collector in list(self._collectors):
            try:
                found += map(MetricFamily.of, await collector.collect())
            except Exception as error:  # noqa: BLE001  # one cell's failure must not hide the others' metrics
                if collector in self._collectors:  # otherwise its cell has stopped
                    self._log.error("metrics could not be collected", of=collector.name, exc_info=error)
            await anyio.lowlevel.checkpoint()  # let other tasks run
        return found


# Concurrent requests share one run, and runs are limited to a share of the time.

T = TypeVar("T")

MAX_SHARE = 0.1
"""Maximum share of time that runs take under continuous requests."""


class CoalescedRuns(Generic[T]):
    """Runs a function once for all callers that wait; later callers wait for the next run."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._next: asyncio.Task[T] | None = None
        """The next run, not started yet; None without a request."""
        self._latest: asyncio.Task[T] | None = None
        self._not_before = 0.0

    async def get(self) -> T:
        """Return the result of a run that starts after this call; raises its error."""
        if self._next is None:
            self._next = self._latest = asyncio.get_running_loop().create_task(self._do(self._latest))
        return await asyncio.shield(self._next)

    async def _do(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        loop = asyncio.get_running_loop()
        if (pause := self._not_before - loop.time()) > 0:
            await asyncio.sleep(pause)
        self._next = None
        began = loop.time()
        try:
            return await self._work()
        finally:
            took = loop.time() - began
            self._not_before = loop.time() + took / MAX_SHARE - took


# The HTTP server that Prometheus scrapes; it serves only ``/metrics``.


@after(AgentConfig)
class MetricsServer:
    """Serves ``/metrics`` if an address is set; the start fails if it cannot listen.

    Starts as soon as the agent has claimed the node, so that a start that hangs can be examined.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        *,
        metrics: Metrics,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._address = settings.address
        self._server: HttpServer | None = None
        self._exposition = Exposition(metrics, log)
        if self._address is not None:
            lifecycle.append(Hook("serve metrics", self._start, self._stop))

    async def _start(self) -> None:
        address = self._address
        assert address is not None  # noqa: S101  # the hook exists only with an address
        self._metrics.warn_ignored_choices()
        listener = listen("prometheus-serve-addr", address)
        from lifecycle.http import SCRAPED, HttpServer

        self._server = HttpServer(self._exposition.answer, grace=1.0, limits=SCRAPED, log=self._log)
        # Cancelled here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            await self._server.serve(listener)
        self._log.info("serving metrics", address=str(address))

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.close()


class Exposition:
    """Answers ``/metrics`` in Prometheus's text format, and other paths with 404 as Go's server does."""

    def __init__(self, metrics: Metrics, log: Logger) -> None:
        self._metrics = metrics
        self._log = log
        self._text = CoalescedRuns(self._collect)

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        from lifecycle.http import Response

        if request.path != "/metrics":
            no_sniff = {"X-Content-Type-Options": "nosniff"}
            return Response(404, b"404 page not found\n", "text/plain; charset=utf-8", no_sniff)
        return await self._text.get()

    async def _collect(self) -> Response:
        from lifecycle.http import Response

        try:
            text = exposition(await self._metrics.families())
        except InconsistentError as error:
            self._log.error("inconsistent metrics", error=str(error))
            return Response(500, f"{error}\n".encode(), "text/plain; charset=utf-8")
        return Response(200, text.encode(), CONTENT_TYPE)


def listen(setting: str, address: ListenAddress) -> socket.socket:
    """Create a listening socket; without a host or with ``[::]``, for both families, as in Go.

    Raises HiveError, one line that names the setting.
    """
    host, port = address
    dual_stack = host in {"", "::"} and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=dual_stack)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise HiveError(
            f"{setting}: {address} cannot be served ({reason}): stop what listens there, or choose another"
            " address"
        ) from error


@after(MetricsServer)
def collect_from_cells(metrics: Metrics, collectors: list[Member[Collector]], lifecycle: Lifecycle) -> None:
    """Add the cells' collectors after their start, and remove them before their stop."""

    async def start() -> None:
        metrics.add(collectors)

    async def stop() -> None:
        metrics.remove(collectors)

    lifecycle.append(Hook("collect metrics of the cells", start, stop))


choice_cell = module(
    "metrics-choice", "Which metrics are served", config(MetricChoiceSettings), provide(metric_choice)
)

cell = group(
    choice_cell,
    module(
        "metrics",
        "Metrics in Prometheus's text form",
        config(MetricsSettings),
        provide(Metrics, MetricsServer),
        invoke(collect_from_cells),
    ),
)
