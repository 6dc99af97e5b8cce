"""Counts flows while Hubble is enabled, and serves flow metrics on their own address.

Source: Cilium 1.17, hubble-metrics, hubble-metrics-server and enable-hubble-open-metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from cells.base.metrics import Histogram, MetricFamily, counter, histogram
from cells.config.drift import file_changes
from cells.endpoint import Endpoint
from cells.hubble.export.exporters import Exporters
from cells.hubble.hubble import Hubble
from cells.hubble.rpc.server import HubbleServer, ServerCertificates
from cells.observe.metrics import ListenAddress, listen
from lifecycle import Health, Jobs, Lifecycle, Logger, Settings, Table
from lifecycle.process import CONTENT_TYPE, exposition

if TYPE_CHECKING:  # imported only if Hubble is enabled
    import ssl

    from cells.hubble.metrics.kinds import FlowMetrics
    from lifecycle.http import Request, Response

DELETED_AFTER: Final = 60.0
"""Seconds between the deletion of a pod and that of its series, so that they are scraped once more."""
_OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class HubbleMetricsSettings(Settings, frozen=True):
    """Which metrics of flows there are, and where they are served."""

    hubble_metrics: str = ""
    """Metrics with blanks between, each with options: drop:sourceContext=pod dns:query flow. Empty: none."""

    hubble_dynamic_metrics_config_path: str = ""
    """YAML file of the metrics, with filters of what each counts, in place of hubble-metrics; followed."""

    hubble_metrics_server: str = ""
    """Address to serve them on, such as :9965; empty: not served."""

    hubble_metrics_server_enable_tls: bool = False
    """Serve them with TLS 1.3, by hubble-metrics-server-tls-cert-file and -key-file."""

    hubble_metrics_server_tls_cert_file: str = ""
    """File with the certificate (PEM); read again when it changes."""

    hubble_metrics_server_tls_key_file: str = ""
    """File with the private key of that certificate."""

    hubble_metrics_server_tls_client_ca_files: tuple[str, ...] = ()
    """Files with CA certificates that scrapers' certificates must be of; empty: they need none."""

    enable_hubble_open_metrics: bool = False
    """Answer in OpenMetrics's form, with exemplars, to who asks for it."""

    def faults(self) -> Iterator[str]:
        if self.hubble_metrics_server:
            try:
                ListenAddress.parse(self.hubble_metrics_server)
            except ValueError as error:
                yield f"hubble-metrics-server={self.hubble_metrics_server}: {error}"
        if self.hubble_metrics:
            from cells.hubble.metrics.kinds import FlowMetrics, metrics_of

            try:
                FlowMetrics(metrics_of(self.entries))
            except ValueError as error:
                yield f"hubble-metrics: {error}"
        if self.hubble_metrics and self.hubble_dynamic_metrics_config_path:
            yield "hubble-metrics and hubble-dynamic-metrics-config-path: only one of them may be set"
        pair = self.hubble_metrics_server_tls_cert_file, self.hubble_metrics_server_tls_key_file
        if self.hubble_metrics_server_enable_tls and not all(pair):
            yield (
                "hubble-metrics-server-enable-tls without hubble-metrics-server-tls-cert-file and"
                " hubble-metrics-server-tls-key-file: set both"
            )
        if self.hubble_metrics_server_tls_client_ca_files and not self.hubble_metrics_server_enable_tls:
            yield (
                "hubble-metrics-server-tls-client-ca-files without hubble-metrics-server-enable-tls: every"
                " client would be served; set it, or leave the files out"
            )

    @property
    def entries(self) -> list[str]:
        """The configured metrics."""
        return self.hubble_metrics.split()


class HubbleMetrics:
    """Counts flows in a job, with the metrics of the settings or of the watched file."""

    def __init__(
        self,
        hubble: Hubble,
        settings: HubbleMetricsSettings,
        *,
        exporters: Exporters,
        endpoints: Table[int, Endpoint],
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._settings = settings
        self.exporters = exporters
        self._endpoints = endpoints
        self._health = health.child("metrics-file")
        self._log = log
        self._flows: FlowMetrics | None = None
        self._hubble = hubble
        if hubble.observer is None:
            return
        self._observer = hubble.observer
        if settings.hubble_dynamic_metrics_config_path:
            jobs.one_shot("follow the file of metrics", self._follow_file)
        if settings.entries or settings.hubble_dynamic_metrics_config_path:
            jobs.one_shot("count flows", self._count)
            jobs.one_shot("remove series of deleted pods", self._remove)

    @property
    def served(self) -> bool:
        """Whether hubble-metrics-server has an address."""
        return self.lost is not None and bool(self._settings.hubble_metrics_server)

    @property
    def flows(self) -> FlowMetrics:
        """The configured flow metrics."""
        if self._flows is None:
            from cells.hubble.metrics.kinds import FlowMetrics, metrics_of

            self._flows = FlowMetrics(metrics_of(self._settings.entries))
        return self._flows

    @property
    def lost(self) -> Mapping[str, int] | None:
        """Number of lost events by queue; None if Hubble is disabled."""
        return None if self._hubble.observer is None else dict(self._hubble.observer.lost)

    async def _follow_file(self) -> None:
        path = Path(self._settings.hubble_dynamic_metrics_config_path)
        async for _ in file_changes(path):
            self._read_file(path)

    def _read_file(self, path: Path) -> None:
        """Apply the watched file; an unreadable or invalid one leaves the configuration unchanged."""
        from cells.hubble.metrics.kinds import configured_metrics

        try:
            wanted = configured_metrics(path.read_text())
            self.flows.follow(wanted)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            wrong = f"hubble-dynamic-metrics-config-path={path}: {reason}; metrics stay as they were"
            self._log.warning(wrong)
            self._health.degraded(wrong)
        else:
            self._log.info("flow metrics", names=" ".join(one.name for one in wanted))
            self._health.ok(f"{len(wanted)} metrics of the file are counted")

    async def _count(self) -> None:
        from cells.hubble.flow import Flow

        flows = self.flows
        async for batch in self._observer.follow():
            for seen in batch:
                if isinstance(seen.event, Flow):
                    flows.process(seen.event)

    async def _remove(self) -> None:
        async with anyio.create_task_group() as tasks:
            async for batch in self._endpoints.changes():
                for change in batch:
                    if change.deleted and change.old is not None and change.old.pod_name:
                        tasks.start_soon(self._remove_pod, change.old)

    async def _remove_pod(self, endpoint: Endpoint) -> None:
        await anyio.sleep(DELETED_AFTER)
        name = (endpoint.pod_namespace, endpoint.pod_name)
        if not any((one.pod_namespace, one.pod_name) == name for _, one, _ in self._endpoints.snapshot()):
            self.flows.remove_pod(*name)


class HubbleMetricsServer:
    """Serves ``/metrics`` if Hubble is enabled and hubble-metrics-server has an address."""

    def __init__(
        self,
        metrics: HubbleMetrics,
        settings: HubbleMetricsSettings,
        *,
        server: HubbleServer,
        jobs: Jobs,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._metrics = metrics
        self._settings = settings
        self._grpc = server
        self._health = health.child("metrics-server")
        self._log = log
        self._answered: Counter[str] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._wrong = ""
        if metrics.lost is None or not settings.hubble_metrics_server:
            return
        lifecycle.enter("serve metrics of flows", self._serving)
        if settings.hubble_metrics_server_enable_tls:
            self._certificates = ServerCertificates(
                settings.hubble_metrics_server_tls_cert_file,
                settings.hubble_metrics_server_tls_key_file,
                settings.hubble_metrics_server_tls_client_ca_files,
                "http/1.1",
            )
            jobs.one_shot("follow certificates of metrics", self._follow_certificates)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        from lifecycle.http import SCRAPED, HttpServer

        tls = self._context if self._settings.hubble_metrics_server_enable_tls else None
        server = HttpServer(self._answer, grace=1.0, limits=SCRAPED, log=self._log, tls=tls)
        address = ListenAddress.parse(self._settings.hubble_metrics_server)
        # If cancelled here, asyncio would leak the listening socket.
        with anyio.CancelScope(shield=True):
            await server.serve(listen("hubble-metrics-server", address))
        self._log.info("serving flow metrics", address=str(address), tls=tls is not None)
        if tls is None:
            self._health.ok("serving")
        try:
            yield
        finally:
            await server.close()

    async def _follow_certificates(self) -> None:
        await self._certificates.follow(self._report)

    def _context(self) -> ssl.SSLContext:
        """Return the TLS context for one handshake. Raises OSError if the files are unusable."""
        try:
            return self._certificates.context()
        finally:
            self._report()

    def _report(self) -> None:
        """Report to health whether the TLS files are usable, and log changes."""
        wrong = self._certificates.load_error()
        if wrong:
            last = "the last good ones are" if self._certificates.usable else "no metrics are served"
            wrong = f"hubble-metrics-server-tls files cannot be used: {wrong}; {last}"
            self._health.degraded(wrong)
        else:
            self._health.ok("serving")
        if wrong and wrong != self._wrong:
            self._log.warning(wrong)
        self._wrong = wrong

    async def _answer(self, request: Request) -> Response:
        from lifecycle.http import Response

        if request.path != "/metrics":
            return Response(404)
        began, flows = anyio.current_time(), self._metrics.flows
        wanted = "application/openmetrics-text" in request.headers.get("accept", "")
        if self._settings.enable_hubble_open_metrics and wanted:
            from cells.hubble.metrics.series import openmetrics

            text, kind = openmetrics(list(flows.all()), list(self._static_families())), _OPENMETRICS
        else:
            text, kind = exposition([*flows.families(), *self._static_families()]), CONTENT_TYPE
        self._answered["200"] += 1
        self._durations.setdefault("200", Histogram()).observe(anyio.current_time() - began)
        return Response(200, text.encode(), kind)

    def _static_families(self) -> Iterator[MetricFamily]:
        """Return the metrics that do not depend on the configuration."""
        lost = self._metrics.lost or {}
        yield counter("hubble_lost_events_total", "Number of lost events", lost, "source")
        yield counter(
            "hubble_metrics_http_handler_requests_total",
            "A counter for requests to the metrics handler",
            dict(self._answered),
            "code",
        )
        yield histogram(
            "hubble_metrics_http_handler_request_duration_seconds",
            "A histogram of latencies of requests to the metrics handler",
            dict(self._durations),
            "code",
        )
        yield from self._metrics.exporters.families()
        names = ("started", "received", "sent", "handled")
        totals: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in names}
        for counts in self._grpc.counts:
            for name in names:
                totals[name].update(getattr(counts, name))
        labels = "grpc_type grpc_service grpc_method"
        text = "Total number of RPCs started on the server."
        yield counter("grpc_server_started_total", text, totals["started"], labels)
        text = "Total number of RPCs completed on the server, regardless of success or failure."
        yield counter("grpc_server_handled_total", text, totals["handled"], f"{labels} grpc_code")
        text = "Total number of RPC stream messages received on the server."
        yield counter("grpc_server_msg_received_total", text, totals["received"], labels)
        text = "Total number of gRPC stream messages sent by the server."
        yield counter("grpc_server_msg_sent_total", text, totals["sent"], labels)
