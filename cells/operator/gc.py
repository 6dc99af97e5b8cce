"""Garbage collection of identities, CiliumEndpoints and CiliumNodes.

An agent that died cannot delete its objects. Orphans are found by comparing tables of the cluster's objects,
once all tables involved are synchronized. Deletions have the object's uid as a precondition, those of
identities the resourceVersion as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Final

import anyio
import msgspec

from cells.base.metrics import Collector, MetricFamily, counter, gauge
from cells.cluster.identity.numbers import ClusterNumbers
from cells.kubernetes.client.errors import ConflictError, KubernetesError, NotFoundError
from cells.kubernetes.client.transport import WriteRequest
from cells.kubernetes.objects.cilium_endpoint import CILIUM_ENDPOINTS, CiliumEndpoint, owner_of
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.core import NODES
from cells.kubernetes.objects.kind import Key, Meta
from cells.observe.metrics import Metrics
from cells.operator.api_server import ClusterAPI
from cells.operator.objects import CLUSTER_IDENTITIES, CLUSTER_PODS, ClusterIdentity, ClusterObjects
from cells.operator.options import ServedCluster
from lifecycle import (
    Duration,
    Jobs,
    Lifecycle,
    Logger,
    Settings,
    after,
    config,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["CiliumEndpointGC", "GCSettings", "IdentityGC", "IdentityPasses", "NodeGC", "cell"]


class GCSettings(Settings, frozen=True):
    """Settings of garbage collection."""

    nodes_gc_interval: Annotated[Duration, msgspec.Meta(ge=0)] = minutes(5)
    """Interval of the search for CiliumNodes without a Node; one is deleted when it is found twice. 0: never.
    """

    cilium_endpoint_gc_interval: Duration = minutes(5)
    """Interval of the search for CiliumEndpoints without a running pod."""

    identity_gc_interval: Annotated[Duration, msgspec.Meta(ge=0)] = minutes(15)
    """Interval of the search for identities without endpoints; 0: never."""

    identity_heartbeat_timeout: Annotated[Duration, msgspec.Meta(gt=0)] = minutes(30)
    """How long an identity without endpoints is preserved."""

    identity_gc_rate_interval: Annotated[Duration, msgspec.Meta(gt=0)] = minutes(1)
    """Interval of identity-gc-rate-limit."""

    identity_gc_rate_limit: Annotated[int, msgspec.Meta(gt=0)] = 2500
    """Maximum number of identities that are deleted in identity-gc-rate-interval."""

    def faults(self) -> Iterator[str]:
        if self.cilium_endpoint_gc_interval <= 0:
            yield (
                f"cilium-endpoint-gc-interval={self.cilium_endpoint_gc_interval}: expected more than 0:"
                " CiliumEndpoints show which identities are in use"
            )


# Counters of identity GC, for CiliumIdentities and for identities in the kvstore.
#
# Source: Cilium 1.17, the operator's metrics identity_gc_*.


class IdentityPasses:
    """Counts the passes and the identities of the last pass, by store: ``crd`` or ``kvstore``."""

    def __init__(self, settings: GCSettings) -> None:
        self.interval = settings.identity_gc_interval
        """Seconds between passes; 0 for none."""
        self.most, self.within = settings.identity_gc_rate_limit, settings.identity_gc_rate_interval
        """Maximum number of identities that are deleted within ``within`` seconds."""
        self.entries: dict[tuple[str, str], int] = {}
        """(``alive`` or ``deleted``, store) -> number of identities in the last pass."""
        self.runs: dict[tuple[str, str], int] = {}
        """(``success`` or ``fail``, store) -> number of passes."""
        self.latency: dict[tuple[str, str], float] = {}
        """(outcome, store) -> duration of the last pass in seconds."""

    def expect(self, where: str) -> None:
        """Initialize the counters of a store with 0."""
        for status in ("alive", "deleted"):
            self.entries.setdefault((status, where), 0)
        for outcome in ("success", "fail"):
            self.runs.setdefault((outcome, where), 0)
        self.latency.setdefault(("success", where), 0.0)

    def record(self, where: str, *, alive: int, deleted: int) -> None:
        """Record the result of a pass."""
        self.entries["alive", where] = alive
        self.entries["deleted", where] = deleted

    @contextmanager
    def counted(self, where: str) -> Iterator[None]:
        """Count the block as a pass, and its duration; an exception counts as a failure."""
        began = time.monotonic()
        try:
            yield
        except BaseException:
            self.runs["fail", where] += 1
            raise
        self.runs["success", where] += 1
        self.latency["success", where] = time.monotonic() - began


# Deletes CiliumNodes without a Node.
#
# Source: Cilium 1.17. An orphan is deleted at the second pass that finds it, since a Node may be deleted and
#         recreated while it is registered again. Kubernetes itself deletes CiliumNodes with ownerReferences.


class NodeGC:
    """Deletes CiliumNodes without a Node, every nodes-gc-interval."""

    def __init__(
        self, settings: GCSettings, server: ClusterAPI, objects: ClusterObjects, *, jobs: Jobs, log: Logger
    ) -> None:
        self._server = server
        self._log = log
        self._nodes = objects.table(NODES)
        self._cilium_nodes = objects.table(CILIUM_NODES)
        self._suspects: dict[str, str] = {}
        """Name -> uid of the orphans of the last pass."""
        if settings.nodes_gc_interval:
            jobs.timer("nodes", self.collect, settings.nodes_gc_interval)

    async def collect(self) -> None:
        """Run one pass. Raises KubernetesError if a deletion failed."""
        await self._nodes.wait_initialized()
        await self._cilium_nodes.wait_initialized()
        orphans = {
            one.name: one.metadata.uid
            for one in self._cilium_nodes.all()
            if not one.metadata.owner_references and self._nodes.get(("", one.name)) is None
        }
        found_twice = orphans.items() & self._suspects.items()
        self._suspects = orphans
        failure: KubernetesError | None = None
        for name, uid in sorted(found_twice):
            try:
                await self._server.client.delete(CILIUM_NODES, name, uid=uid)
            except ConflictError:
                continue  # recreated meanwhile
            except KubernetesError as error:
                failure = error
                continue
            self._log.info("CiliumNode without a Node deleted", node=name)
        if failure is not None:
            raise failure


# Deletes CiliumEndpoints of pods that are deleted or have terminated.
#
# Source: Cilium 1.17, operator/endpointgc. Unlike Cilium, the API server is queried for a pod that the table
#         lacks before its endpoint is deleted, since the watch of pods may lag behind that of endpoints.

PAGE: Final = 500
"""Page size of lists."""


class _PageMeta(msgspec.Struct, frozen=True):
    next: str = msgspec.field(name="continue", default="")


class _Item(msgspec.Struct, frozen=True):
    metadata: Meta


class _Page(msgspec.Struct, frozen=True):
    metadata: _PageMeta = _PageMeta()
    items: tuple[_Item, ...] = ()


_PAGE: Final = msgspec.json.Decoder(_Page)


class CiliumEndpointGC:
    """Deletes CiliumEndpoints without a running pod, at the start and at every interval.

    With disable-endpoint-crd it deletes all of them, once.
    """

    def __init__(
        self, settings: GCSettings, server: ClusterAPI, objects: ClusterObjects, *, jobs: Jobs, log: Logger
    ) -> None:
        self._server = server
        self._log = log
        self.deleted = 0
        """Number of deleted objects."""
        self.failed = 0
        """Number of failed deletions."""
        if not objects.resources.endpoints:
            jobs.one_shot("clear", self.clear)
            return
        self._endpoints = objects.table(CILIUM_ENDPOINTS)
        self._pods = objects.table(CLUSTER_PODS)
        self._nodes = objects.table(CILIUM_NODES)
        jobs.timer("endpoints", self.collect, settings.cilium_endpoint_gc_interval).trigger()

    async def clear(self) -> None:
        """Delete all CiliumEndpoints, which no agent uses any more. Raises KubernetesError."""
        client, query = self._server.client, {"limit": str(PAGE)}
        while True:
            try:
                page = _PAGE.decode(await client.page(CILIUM_ENDPOINTS, query))
            except NotFoundError:
                return  # the custom resource is not registered
            for one in page.items:
                meta = one.metadata
                if await client.delete(CILIUM_ENDPOINTS, meta.name, meta.namespace, uid=meta.uid):
                    self.deleted += 1
            if not page.metadata.next:
                break
            query = {"limit": str(PAGE), "continue": page.metadata.next}
        if self.deleted:
            self._log.info("CiliumEndpoints deleted: disable-endpoint-crd is set", count=self.deleted)

    async def collect(self) -> None:
        """Run one pass. Raises KubernetesError if a deletion failed."""
        for table in (self._endpoints, self._pods, self._nodes):
            await table.wait_initialized()
        orphans = sorted(
            (one for one in self._endpoints.all() if not self._needed(one)), key=lambda one: one.key
        )
        failure: KubernetesError | None = None
        for one in orphans:
            namespace, name = one.key
            try:
                if await self._pod_is_new(one):
                    continue
                await self._server.client.delete(CILIUM_ENDPOINTS, name, namespace, uid=one.metadata.uid)
            except ConflictError:
                continue  # recreated meanwhile
            except KubernetesError as error:
                self.failed += 1
                failure = error
                continue
            self.deleted += 1
            self._log.info("CiliumEndpoint without a pod deleted", endpoint=f"{namespace}/{name}")
        if failure is not None:
            raise failure

    def _needed(self, endpoint: CiliumEndpoint) -> bool:
        """Whether its pod runs; without a pod, whether the node that owns it exists."""
        pod = self._pods.get(endpoint.key) or self._pods.get(self._owner(endpoint))
        if pod is not None:
            return not pod.finished
        nodes = [one.name for one in endpoint.metadata.owner_references or () if one.kind == "CiliumNode"]
        return any(self._nodes.get(("", name)) is not None for name in nodes)

    def _owner(self, endpoint: CiliumEndpoint) -> Key:
        """Return namespace and name of the owning pod, by default its own name."""
        return endpoint.namespace, owner_of(endpoint)[0] or endpoint.name

    async def _pod_is_new(self, endpoint: CiliumEndpoint) -> bool:
        """Whether the API server has its pod and the table lacks it. Raises KubernetesError."""
        key = self._owner(endpoint)
        if self._pods.get(endpoint.key) or self._pods.get(key):
            return False  # it has terminated
        try:
            pod = await self._server.client.get(CLUSTER_PODS, key[1], key[0])
        except NotFoundError:
            return False
        return not pod.finished


# Deletes identities that no endpoint has had for a while.
#
# Source: Cilium 1.17, operator/identitygc: an identity without endpoints is marked with the time. An agent
#         that uses it again removes the mark. An identity is deleted once it was marked for the heartbeat
#         timeout.
#
# There are 65,280 numbers for a cluster, half as many in a mesh of 511. When more than half of them are
# allocated, marks expire after a minute, passes run more often and the deletion limit is lifted, so that
# short-lived pods do not exhaust the numbers.

HEARTBEAT: Final = "io.cilium.heartbeat"
CRD: Final = "crd"
SHORT_TIMEOUT, SHORT_INTERVAL = 60.0, 15.0
"""Seconds, while more than half of the numbers are allocated."""
AT_ONCE: Final = 16
"""Number of connections with pipelined requests."""
IN_A_ROW: Final = 16
"""Number of pipelined requests per connection."""


class IdentityGC:
    """Marks and deletes CiliumIdentities without endpoints, every identity-gc-interval."""

    def __init__(
        self,
        settings: GCSettings,
        server: ClusterAPI,
        objects: ClusterObjects,
        passes: IdentityPasses,
        cluster: ServedCluster,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._half = len(ClusterNumbers(cluster.number, cluster.most_clusters).allocatable) // 2
        self._server = server
        self._log = log
        self._identities = objects.table(CLUSTER_IDENTITIES)
        self._seen: dict[str, float] = {}
        """Identity -> when an endpoint was last seen with it, in seconds of the monotonic clock."""
        self._began = time.monotonic()
        self._window: deque[float] = deque()
        """Times of deletions within the last identity-gc-rate-interval."""
        self._deleted = 0
        """Number of identities deleted in this pass."""
        self._passes = passes
        passes.expect(CRD)
        if settings.identity_gc_interval and objects.resources.endpoints:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            interval = min(settings.identity_gc_interval, SHORT_INTERVAL)
            self._due = time.monotonic() + settings.identity_gc_interval
            jobs.timer("identities", self.tick, interval)

    @property
    def over_half_allocated(self) -> bool:
        """Whether more than half of the numbers are allocated."""
        return len(self._identities) > self._half

    async def tick(self) -> None:
        """Run a pass if one is due or numbers run short; else only note identities in use."""
        if time.monotonic() < self._due - 0.001 and not self.over_half_allocated:
            self._note_used()
            return
        self._due = time.monotonic() + self._settings.identity_gc_interval
        with self._passes.counted(CRD):
            await self.collect()

    def _note_used(self) -> None:
        """Note which identities are in use now."""
        now = time.monotonic()
        for endpoint in self._endpoints.all():
            if endpoint.status.identity is not None:
                self._seen[str(endpoint.status.identity.id)] = now

    async def collect(self) -> None:
        """Run one pass. Raises KubernetesError."""
        await self._identities.wait_initialized()
        await self._endpoints.wait_initialized()
        self._note_used()
        timeout = float(self._settings.identity_heartbeat_timeout)
        if self.over_half_allocated:
            timeout = min(timeout, SHORT_TIMEOUT)
        now = time.monotonic()
        live = {name for name, seen in self._seen.items() if now - seen < timeout}
        self._seen = {name: seen for name, seen in self._seen.items() if name in live}
        unused = [one for one in self._identities.all() if one.name not in live]
        alive = len(self._identities) - len(unused)
        self._deleted = 0
        self._passes.record(CRD, alive=alive, deleted=0)
        if now - self._began < timeout:
            return  # after a restart, endpoints of live pods may not be reported yet
        waiting = iter(unused)
        failures: list[KubernetesError] = []

        async def work() -> None:
            while some := list(islice(waiting, IN_A_ROW)):
                failures.extend(await self._mark_or_delete(some, timeout))

        async with anyio.create_task_group() as group:
            for _ in range(min(AT_ONCE, len(unused))):
                group.start_soon(work)
        self._passes.record(CRD, alive=alive, deleted=self._deleted)
        if self._deleted:
            self._log.info("identities without endpoints deleted", count=self._deleted, alive=alive)
        if failures:
            raise failures[0]

    async def _mark_or_delete(
        self, identities: Iterable[ClusterIdentity], patience: float
    ) -> list[KubernetesError]:
        """Mark or delete identities; return the errors. Conflicts are left to the next pass."""
        requests = [one for each in identities if (one := self._request(each, patience)) is not None]
        if not requests:
            return []
        failures: list[KubernetesError] = []
        for request, error in zip(requests, await self._server.client.send_all(requests), strict=True):
            if error is None:
                self._deleted += request.method == "DELETE"
            elif not isinstance(error, NotFoundError | ConflictError):
                failures.append(error)
        return failures

    def _request(self, identity: ClusterIdentity, patience: float) -> WriteRequest | None:
        """Return the request that marks or deletes an identity, or None for neither."""
        marked = _parse_time(identity.annotations.get(HEARTBEAT))
        client, known = self._server.client, identity.metadata
        if marked is None:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            body = {"metadata": {"uid": known.uid, "annotations": {HEARTBEAT: stamp}}}
            return client.merge(CLUSTER_IDENTITIES, identity.name, body)
        if time.time() - marked < patience or not self._allowed():
            return None  # retried by the next pass
        # the resourceVersion prevents deletion after another write, such as an agent's removal of the mark
        return client.deletion(
            CLUSTER_IDENTITIES, identity.name, uid=known.uid, version=known.resource_version
        )

    def _allowed(self) -> bool:
        """Whether the rate limit allows another deletion now."""
        now = time.monotonic()
        while self._window and now - self._window[0] >= self._settings.identity_gc_rate_interval:
            self._window.popleft()
        if len(self._window) >= self._settings.identity_gc_rate_limit and not self.over_half_allocated:
            self._due = min(self._due, now + self._settings.identity_gc_rate_interval)
            return False
        self._window.append(now)
        return True


def _parse_time(text: str | None) -> float | None:
    """Return seconds since the epoch, or None for an invalid time."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


# Metrics, as of Cilium 1.17's operator; runs and latency are gauges there.


def collect_metrics(
    metrics: Metrics, endpoints: CiliumEndpointGC, identities: IdentityPasses, lifecycle: Lifecycle
) -> None:
    """Report the metrics while this operator leads."""

    async def collect() -> Iterable[MetricFamily]:
        return families(endpoints, identities)

    metrics.report(lifecycle, Collector("gc", collect))


def families(endpoints: CiliumEndpointGC, identities: IdentityPasses) -> list[MetricFamily]:
    """Return the metrics of garbage collection."""
    return [
        counter(
            "cilium_operator_endpoint_gc_objects",
            "CiliumEndpoints that were collected.",
            {"success": endpoints.deleted, "fail": endpoints.failed},
            "outcome",
        ),
        gauge(
            "cilium_operator_identity_gc_entries",
            "Identities of the last pass.",
            dict(identities.entries),
            "status identity_type",
        ),
        gauge(
            "cilium_operator_identity_gc_runs",
            "Passes over identities.",
            dict(identities.runs),
            "outcome identity_type",
        ),
        gauge(
            "cilium_operator_identity_gc_latency",
            "Seconds the last pass over identities took.",
            dict(identities.latency),
            "outcome identity_type",
        ),
    ]


@after(NodeGC, CiliumEndpointGC, IdentityGC)
def collect() -> None:
    """Start all three collectors."""


cell = module(
    "gc",
    "Deletes objects that are no longer needed",
    config(GCSettings),
    provide(NodeGC, CiliumEndpointGC, IdentityGC, IdentityPasses),
    invoke(collect, collect_metrics),
)
