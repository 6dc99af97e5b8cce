"""Results of probes: the report of all nodes, and Cilium's connectivity metrics.

``NodeProber`` records outcomes by address; the API and ``ConnectivityMetrics`` read reports. Outcomes belong
to addresses, so an address that moves to another node keeps its outcome.

Source: Cilium 1.17, pkg/health/server (prober, status) and pkg/health/client (reachability).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

from cells.base.metrics import Histogram, MetricFamily, gauge, histogram

Reach = Literal["reachable", "unreachable", "unknown"]
STATES: Final[tuple[Reach, ...]] = ("reachable", "unreachable", "unknown")


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a probe: its latency in nanoseconds, or its error."""

    latency: int = 0
    failure: str = ""


class ProbedPath(msgspec.Struct, frozen=True):
    """An address and its last outcomes; None before the first probe."""

    ip: str
    icmp: Outcome | None = None
    http: Outcome | None = None

    @property
    def reach(self) -> Reach:
        """Unreachable if a probe failed, unknown if an outcome is missing, else reachable."""
        outcomes = (self.icmp, self.http)
        if any(each is not None and each.failure for each in outcomes):
            return "unreachable"
        return "unknown" if None in outcomes else "reachable"


class ProbedNode(msgspec.Struct, frozen=True):
    """A node and its addresses to probe, the primary one first."""

    name: str
    """``cluster/name``."""
    host: tuple[str, ...]
    endpoint: tuple[str, ...] = ()
    """Addresses of its health endpoint."""


class NodeReport(msgspec.Struct, frozen=True):
    """The outcomes at a node's addresses, the primary one first."""

    name: str
    host: tuple[ProbedPath, ...]
    endpoint: tuple[ProbedPath, ...]
    since: float = 0.0
    """Time of the last change between reachable and unreachable, in Unix seconds; start of that round."""

    @property
    def reachable(self) -> bool:
        """Whether no probe failed; unknown counts as reachable, as in Cilium."""
        return all(path.reach != "unreachable" for path in (*self.host, *self.endpoint))


class ClusterReport(msgspec.Struct, frozen=True):
    """The outcomes of one round for all nodes."""

    started: float
    """Start of the round, in Unix seconds."""
    nodes: tuple[NodeReport, ...] | None = None
    """By name; None before the end of the first round."""


class ProbeResults:
    """The nodes to probe, and the last outcomes by address."""

    def __init__(self) -> None:
        self._nodes: dict[str, ProbedNode] = {}
        self._uses: Counter[str] = Counter()
        self._paths: dict[str, ProbedPath] = {}
        self._since: dict[str, tuple[bool, float]] = {}

    def update(self, nodes: Iterable[ProbedNode], removed: Iterable[str] = ()) -> None:
        """Add, replace and remove nodes; drop outcomes of addresses that no node has."""
        before = [ip for name in removed for ip in self._replace(name, None)]
        before += (ip for node in nodes for ip in self._replace(node.name, node))
        for ip in before:
            if not self._uses[ip]:
                del self._uses[ip]
                self._paths.pop(ip, None)

    def _replace(self, name: str, node: ProbedNode | None) -> tuple[str, ...]:
        """Replace or remove a node; return its previous addresses."""
        before = self._nodes.pop(name, None)
        if before is not None:
            self._uses.subtract((*before.host, *before.endpoint))
        if node is not None:
            self._nodes[name] = node
            self._uses.update((*node.host, *node.endpoint))
        else:
            self._since.pop(name, None)
        return (*before.host, *before.endpoint) if before is not None else ()

    def addresses(self) -> list[str]:
        """Return all addresses to probe."""
        return list(self._uses)

    def record(self, ip: str, icmp: Outcome | None = None, http: Outcome | None = None) -> None:
        """Record outcomes at an address; None keeps the previous one.

        An address without a node is ignored.
        """
        if ip in self._uses:
            last = self._paths.get(ip) or ProbedPath(ip)
            self._paths[ip] = ProbedPath(ip, icmp or last.icmp, http or last.http)

    def report(self, started: float) -> ClusterReport:
        """Return the report of the round that began at ``started``."""
        return ClusterReport(
            started, tuple(self._node_report(self._nodes[name], started) for name in sorted(self._nodes))
        )

    def _node_report(self, node: ProbedNode, started: float) -> NodeReport:
        host, endpoint = (tuple(map(self._path, ips)) for ips in (node.host, node.endpoint))
        found = NodeReport(node.name, host, endpoint)
        reachable, since = self._since.get(node.name, (None, started))
        if reachable is not found.reachable:
            since = started
            self._since[node.name] = found.reachable, since
        return msgspec.structs.replace(found, since=since)

    def _path(self, ip: str) -> ProbedPath:
        return self._paths.get(ip) or ProbedPath(ip)


# Metrics of published reports.

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Upper bounds in seconds."""
FAILED_SECONDS: Final = 10.0
"""Latency in the histogram for a failed probe."""
_NODE: Final = "source_cluster source_node_name target_cluster target_node_name target_node_type type"
_KINDS: Final = ("node", "endpoint")


class ConnectivityMetrics:
    """Metrics of the last report, and histograms of the latencies of all reports."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._source = _split_name(own)
        self._report = ClusterReport(0.0)
        self._latencies: dict[tuple[str, ...], Histogram] = defaultdict(lambda: Histogram(BUCKETS))

    def publish(self, report: ClusterReport) -> None:
        """Replace the report."""
        self._report = report
        for node in report.nodes or ():
            for kind, place, path in _paths(node):
                for protocol, outcome in _outcomes(path):
                    if outcome is not None:
                        seconds = FAILED_SECONDS if outcome.failure else outcome.latency / 1e9
                        self._latencies[*self._source, kind, protocol, place].observe(seconds)

    def families(self) -> list[MetricFamily]:
        """Return the metric families; none before the first report."""
        if self._report.nodes is None:
            return []
        status: dict[tuple[str, ...], float] = {}
        latency: dict[tuple[str, ...], float] = {}
        counts = {(*self._source, kind, state): 0.0 for kind in _KINDS for state in STATES}
        for node in self._report.nodes:
            target = (*self._source, *_split_name(node.name), self._type_of(node.name))
            for kind, place, path in _paths(node):
                key = (*target, kind)
                status[key] = min(status.get(key, 1.0), float(path.reach == "reachable"))
                counts[*self._source, kind, path.reach] += 1
                for protocol, outcome in _outcomes(path):
                    value = -1.0 if outcome is None else outcome.latency / 1e9
                    latency[*key, path.ip, protocol, place] = value
        return [
            gauge(
                "cilium_node_connectivity_status",
                "The last observed status of both ICMP and HTTP connectivity between the current Cilium agent"
                " and other Cilium nodes",
                status,
                _NODE,
            ),
            gauge(
                "cilium_node_connectivity_latency_seconds",
                "The last observed latency between the current Cilium agent and other Cilium nodes in"
                " seconds",
                latency,
                f"{_NODE} target_node_ip protocol address_type",
            ),
            gauge(
                "cilium_node_health_connectivity_status",
                "Number of endpoints with last observed status of both ICMP and HTTP connectivity between the"
                " current Cilium agent and other Cilium nodes",
                counts,
                "source_cluster source_node_name type status",
            ),
            histogram(
                "cilium_node_health_connectivity_latency_seconds",
                "The histogram for last observed latency between the current Cilium agent and other Cilium"
                " nodes in seconds",
                dict(self._latencies),
                "source_cluster source_node_name type protocol address_type",
            ),
        ]

    def _type_of(self, name: str) -> str:
        if name == self._own:
            return "local_node"
        return "remote_intra_cluster" if _split_name(name)[0] == self._source[0] else "remote_inter_cluster"


def _split_name(name: str) -> tuple[str, str]:
    cluster, separator, node = name.partition("/")
    return (cluster, node) if separator else ("default", name)


def _outcomes(path: ProbedPath) -> Iterator[tuple[str, Outcome | None]]:
    yield "http", path.http
    yield "icmp", path.icmp


def _paths(node: NodeReport) -> Iterator[tuple[str, str, ProbedPath]]:
    """Yield the type (node or endpoint), address type (primary or secondary) and path of each address."""
    for kind, paths in zip(_KINDS, (node.host, node.endpoint), strict=True):
        for number, path in enumerate(paths):
            yield kind, "secondary" if number else "primary", path
