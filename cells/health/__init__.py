"""Connectivity between nodes (cilium-health): this node probes all others and answers their probes.

``ClusterHealth`` probes the rows of the table ``nodes`` and stores the last report; ``ProbeResponder``
listens on the node's addresses. The REST API on health.sock is in the api cell. With
enable-health-checking=false, no socket is opened.

Source: Cilium 1.17, pkg/health. Settings: :class:`~cells.health.prober.NodeHealthSettings`.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable
from functools import cached_property

import anyio

from cells.base.addresses import Family
from cells.base.metrics import Collector, MetricFamily
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.health.endpoint import (
    HealthAddresses,
    HealthEndpoint,
    HealthNetwork,
    KernelHealthNetwork,
    answer_probe,
    health_addresses_claimed,
)
from cells.health.paths import (
    ClusterReport,
    ConnectivityMetrics,
    NodeReport,
    Outcome,
    ProbedNode,
    ProbedPath,
    ProbeResults,
)
from cells.health.prober import NodeHealthSettings, NodeProber, ProbeTransport, SocketTransport
from lifecycle import (
    Change,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    config,
    invoke,
    module,
    provide,
    provide_private,
)
from lifecycle.http import SCRAPED, HttpServer

__all__ = [
    "ClusterHealth",
    "ClusterReport",
    "HealthEndpoint",
    "NodeHealthSettings",
    "NodeReport",
    "Outcome",
    "ProbeResponder",
    "ProbeTransport",
    "ProbedPath",
    "cell",
]


def probed_node(node: ClusterNode, families: Iterable[Family], *, endpoints: bool) -> ProbedNode:
    """Return the addresses of a node to probe: one of each family, and its health endpoint's."""
    enabled = tuple(families)
    hosts = (node.node_ip(family) for family in enabled)
    health = (ip for family in enabled for ip in node.health if Family.of(ip) is family)
    return ProbedNode(
        node.full_name,
        tuple(str(ip) for ip in hosts if ip is not None),
        tuple(map(str, health)) if endpoints else (),
    )


def families_of(agent: AgentConfig) -> tuple[Family, ...]:
    """Return the enabled address families, IPv4 first."""
    found = {Family.IPV4: agent.ipv4, Family.IPV6: agent.ipv6}
    return tuple(family for family, enabled in found.items() if enabled)


class ClusterHealth:
    """Probes the nodes of the cluster, and stores the last report."""

    def __init__(
        self,
        settings: NodeHealthSettings,
        agent: AgentConfig,
        nodes: ReadTable[str, ClusterNode],
        transport: ProbeTransport,
        *,
        jobs: Jobs,
    ) -> None:
        self._agent = agent
        self.enabled = settings.enable_health_checking
        """Whether the nodes of the cluster probe each other."""
        self.report = ClusterReport(time.time())
        self._families = families_of(agent)
        self._endpoints = settings.enable_endpoint_health_checking
        self._results = ProbeResults()
        self._prober = NodeProber(
            self._results,
            transport,
            self._publish,
            port=settings.cluster_health_port,
            requests=settings.health_check_icmp_failure_threshold,
            interval=settings.interval,
        )
        if settings.enable_health_checking:
            jobs.observe("follow nodes", nodes.changes, self._follow)
            jobs.one_shot("probe nodes", self._prober.run)

    @property
    def own(self) -> str:
        """This node's name in reports."""
        return f"{self._agent.cluster_name}/{self._agent.node_name}"

    @cached_property
    def metrics(self) -> ConnectivityMetrics:
        """Metrics of this node's probes."""
        return ConnectivityMetrics(self.own)

    async def _follow(self, changes: Iterable[Change[str, ClusterNode]]) -> None:
        found: list[ProbedNode] = []
        removed: list[str] = []
        for change in changes:
            if change.row is not None:
                found.append(probed_node(change.row, self._families, endpoints=self._endpoints))
            elif change.old is not None:
                removed.append(change.old.full_name)
        self._results.update(found, removed)
        if self._results.addresses():
            self._prober.wake()

    def _publish(self, report: ClusterReport) -> None:
        self.report = report
        self.metrics.publish(report)


def connectivity_metrics(health: ClusterHealth) -> Member[Collector]:
    """Provide the results of the probes as metrics."""

    async def collect() -> Iterable[MetricFamily]:
        return health.metrics.families()

    return Collector("cluster-health", collect)


class ProbeResponder:
    """Answers HTTP probes of other nodes at the node's own addresses.

    If another process uses the port, health is degraded and the agent retries.
    """

    enabled: bool
    """Whether the nodes of the cluster probe each other."""
    failure: str
    """Why it does not listen at an address; empty if it listens at all."""

    def __init__(
        self,
        settings: NodeHealthSettings,
        agent: AgentConfig,
        nodes: ReadTable[str, ClusterNode],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.enabled = settings.enable_health_checking
        self.failure = ""
        """Errors of the addresses at which it cannot listen; empty if there are none."""
        self._port = settings.cluster_health_port
        self._families = families_of(agent)
        self._log = log
        self._servers: dict[str, HttpServer] = {}
        if settings.enable_health_checking:
            lifecycle.append(Hook("stop answering probes", stop=self._close))
            own = nodes.filter(lambda node: node.local, name="probed-node")
            jobs.observe("answer probes", own.changes, self._follow)

    async def _follow(self, changes: Iterable[Change[str, ClusterNode]]) -> None:
        """Listen at exactly the node's addresses. Raises HiveError after trying each address."""
        for change in changes:
            if change.row is None:
                continue
            wanted = set(probed_node(change.row, self._families, endpoints=False).host)
            for ip in self._servers.keys() - wanted:
                await self._servers.pop(ip).close()
            failures = []
            for ip in sorted(wanted - self._servers.keys()):
                try:
                    await self._listen(ip)
                except HiveError as error:
                    failures.append(str(error))
            self.failure = "; ".join(failures)
            if failures:
                raise HiveError(self.failure)

    async def _listen(self, ip: str) -> None:
        server = HttpServer(answer_probe, grace=1.0, limits=SCRAPED, log=self._log)
        # Cancelled here, it would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            await server.serve(_listener(ip, self._port))
            self._servers[ip] = server
        self._log.info("serving health probes", address=ip, port=self._port)

    async def _close(self) -> None:
        servers = list(self._servers.values())
        self._servers.clear()
        for server in servers:
            await server.close()


def _listener(ip: str, port: int) -> socket.socket:
    """Create a listening socket. Raises HiveError, one line."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        return socket.create_server((ip, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = "; stop the process that listens there" if error.errno == errno.EADDRINUSE else ""
        raise HiveError(f"health probes cannot be served at {ip} port {port} ({reason}){advice}") from error


def socket_transport() -> ProbeTransport:
    """Provide probes over the kernel's sockets."""
    return SocketTransport()


cell = module(
    "cluster-health",
    "Connectivity between the nodes of the cluster",
    config(NodeHealthSettings),
    provide(
        ClusterHealth,
        ProbeResponder,
        HealthAddresses,
        HealthEndpoint,
        health_addresses_claimed,
        connectivity_metrics,
        socket_transport,
    ),
    provide_private(KernelHealthNetwork, as_=(HealthNetwork,)),
    invoke(ClusterHealth, ProbeResponder, HealthEndpoint),
)
