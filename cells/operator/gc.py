"""Garbage collection: identities, CiliumEndpoints and CiliumNodes that are no longer needed.

Controller: tables of the cluster's objects in, deletions at the API server out.
Why:        an agent that died cannot delete what it wrote. Nothing is deleted before every object that speaks
            for it is known, and then only as it was seen: by uid, identities by version as well.
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


# How often unused objects are looked for, and how fast they are deleted.
#
# Source: Cilium 1.17, options of the operator.


class GCSettings(Settings, frozen=True):
    """Settings of garbage collection."""

    nodes_gc_interval: Annotated[Duration, msgspec.Meta(ge=0)] = minutes(5)
    """How often CiliumNodes without a Node are looked for; one goes when it is found twice. 0 never looks."""

    cilium_endpoint_gc_interval: Duration = minutes(5)
    """How often CiliumEndpoints without a running pod are looked for."""

    identity_gc_interval: Annotated[Duration, msgspec.Meta(ge=0)] = minutes(15)
    """How often identities that no endpoint has are looked for; 0 never looks."""

    identity_heartbeat_timeout: Annotated[Duration, msgspec.Meta(gt=0)] = minutes(30)
    """How long an identity without endpoints is preserved."""

    identity_gc_rate_interval: Annotated[Duration, msgspec.Meta(gt=0)] = minutes(1)
    """The time that identity-gc-rate-limit is about."""

    identity_gc_rate_limit: Annotated[int, msgspec.Meta(gt=0)] = 2500
    """How many identities are deleted in identity-gc-rate-interval at most."""

    def faults(self) -> Iterator[str]:
        if self.cilium_endpoint_gc_interval <= 0:
            yield (
                f"cilium-endpoint-gc-interval={self.cilium_endpoint_gc_interval}: expected more than 0:"
                " CiliumEndpoints show which identities are in use"
            )


# How often passes over identities are, how fast they delete and how they ended, wherever those are stored.
#
# Source: Cilium 1.17, the operator's metrics identity_gc_*.


class IdentityPasses:
    """Counts of the last pass, and of passes, by where identities are stored: ``crd`` or ``kvstore``."""

    def __init__(self, settings: GCSettings) -> None:
        self.interval = settings.identity_gc_interval
        """Seconds from one pass to the next; 0 for none."""
        self.most, self.within = settings.identity_gc_rate_limit, settings.identity_gc_rate_interval
        """How many identities are deleted within so many seconds at most."""
        self.entries: dict[tuple[str, str], int] = {}
        """Status, ``alive`` or ``deleted``, and where -> how many."""
        self.runs: dict[tuple[str, str], int] = {}
        """Outcome, ``success`` or ``fail``, and where -> how many."""
        self.latency: dict[tuple[str, str], float] = {}
        """Outcome and where -> seconds that the last such pass took."""

    def expect(self, where: str) -> None:
        """There will be passes: all counts are 0 until then."""
        for status in ("alive", "deleted"):
            self.entries.setdefault((status, where), 0)
        for outcome in ("success", "fail"):
            self.runs.setdefault((outcome, where), 0)
        self.latency.setdefault(("success", where), 0.0)

    def found(self, where: str, *, alive: int, deleted: int) -> None:
        """What a pass leaves, and what it deleted."""
        self.entries["alive", where] = alive
        self.entries["deleted", where] = deleted

    @contextmanager
    def counted(self, where: str) -> Iterator[None]:
        """Count the pass that the block is; one that raises has failed."""
        began = time.monotonic()
        try:
            yield
        except BaseException:
            self.runs["fail", where] += 1
            raise
        self.runs["success", where] += 1
        self.latency["success", where] = time.monotonic() - began


# Deletes CiliumNodes without their Node.
#
# Source: Cilium 1.17: found in two passes, since a node that is being registered anew has its Node deleted
#         and made again; with ownerReferences Kubernetes itself deletes it.


class NodeGC:
    """Looks every nodes-gc-interval."""

    def __init__(
        self, settings: GCSettings, server: ClusterAPI, objects: ClusterObjects, *, jobs: Jobs, log: Logger
    ) -> None:
        self._server = server
        self._log = log
        self._nodes = objects.table(NODES)
        self._cilium_nodes = objects.table(CILIUM_NODES)
        self._suspects: dict[str, str] = {}
        """Name -> uid of those that had no Node the last time."""
        if settings.nodes_gc_interval:
            jobs.timer("nodes", self.collect, settings.nodes_gc_interval)

    async def collect(self) -> None:
        """One pass. Raises KubernetesError when some could not be deleted."""
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
                continue  # made anew meanwhile
            except KubernetesError as error:
                failure = error
                continue
            self._log.info("CiliumNode without a Node deleted", node=name)
        if failure is not None:
            raise failure


# Deletes CiliumEndpoints of pods that are deleted or have ended.
#
# Source: Cilium 1.17, operator/endpointgc. Other than there, the server is asked for a pod that is not in the
#         table before its endpoint is deleted: the watch of pods may be behind that of endpoints.

PAGE: Final = 500
"""Objects of a list that are asked for at once."""


class _PageMeta(msgspec.Struct, frozen=True):
    next: str = msgspec.field(name="continue", default="")


class _Item(msgspec.Struct, frozen=True):
    metadata: Meta


class _Page(msgspec.Struct, frozen=True):
    metadata: _PageMeta = _PageMeta()
    items: tuple[_Item, ...] = ()


_PAGE: Final = msgspec.json.Decoder(_Page)


class CiliumEndpointGC:
    """Looks at the start and at every interval; where there are to be none, once, and deletes them all."""

    def __init__(
        self, settings: GCSettings, server: ClusterAPI, objects: ClusterObjects, *, jobs: Jobs, log: Logger
    ) -> None:
        self._server = server
        self._log = log
        self.deleted = 0
        """How many were deleted."""
        self.failed = 0
        """How many could not be."""
        if not objects.resources.endpoints:
            jobs.one_shot("clear", self.clear)
            return
        self._endpoints = objects.table(CILIUM_ENDPOINTS)
        self._pods = objects.table(CLUSTER_PODS)
        self._nodes = objects.table(CILIUM_NODES)
        jobs.timer("endpoints", self.collect, settings.cilium_endpoint_gc_interval).trigger()

    async def clear(self) -> None:
        """Delete every CiliumEndpoint: they are neither written nor read any more. Raises KubernetesError."""
        client, query = self._server.client, {"limit": str(PAGE)}
        while True:
            try:
                page = _PAGE.decode(await client.page(CILIUM_ENDPOINTS, query))
            except NotFoundError:
                return  # the resource itself is not there
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
        """One pass. Raises KubernetesError when some could not be deleted."""
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
                continue  # made anew meanwhile
            except KubernetesError as error:
                self.failed += 1
                failure = error
                continue
            self.deleted += 1
            self._log.info("CiliumEndpoint without a pod deleted", endpoint=f"{namespace}/{name}")
        if failure is not None:
            raise failure

    def _needed(self, endpoint: CiliumEndpoint) -> bool:
        """Whether its pod, or else the node that owns it, is there."""
        pod = self._pods.get(endpoint.key) or self._pods.get(self._owner(endpoint))
        if pod is not None:
            return not pod.finished
        nodes = [one.name for one in endpoint.metadata.owner_references or () if one.kind == "CiliumNode"]
        return any(self._nodes.get(("", name)) is not None for name in nodes)

    def _owner(self, endpoint: CiliumEndpoint) -> Key:
        """Namespace and name of the pod that owns it; its own where none does."""
        return endpoint.namespace, owner_of(endpoint)[0] or endpoint.name

    async def _pod_is_new(self, endpoint: CiliumEndpoint) -> bool:
        """Whether its pod is at the server, but not in the table yet. Raises KubernetesError."""
        key = self._owner(endpoint)
        if self._pods.get(endpoint.key) or self._pods.get(key):
            return False  # it has ended
        try:
            pod = await self._server.client.get(CLUSTER_PODS, key[1], key[0])
        except NotFoundError:
            return False
        return not pod.finished


# Deletes identities that no endpoint has had for a while.
#
# Source: Cilium 1.17, operator/identitygc: an identity without endpoints is marked with the time; an agent
#         that uses it again takes the mark away; one that has been marked for the heartbeat timeout goes.
#
# Numbers are few (65,280 for a cluster, half as many in a mesh of 511). When half of them are given out,
# marks count after a minute, passes come quickly and the limit of deletions is lifted, so that pods that come
# and go do not use up all of them.

HEARTBEAT: Final = "io.cilium.heartbeat"
CRD: Final = "crd"
SHORT_TIMEOUT, SHORT_INTERVAL = 60.0, 15.0
"""Seconds, when it is crowded."""
AT_ONCE: Final = 16
"""Connections with requests under way: the server does so many together."""
IN_A_ROW: Final = 16
"""Requests that are sent together on one of them."""


class IdentityGC:
    """Looks every identity-gc-interval."""

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
        self._many = len(ClusterNumbers(cluster.number, cluster.most_clusters).given) // 2
        self._server = server
        self._log = log
        self._identities = objects.table(CLUSTER_IDENTITIES)
        self._seen: dict[str, float] = {}
        """When an endpoint was last seen with an identity, in seconds of the monotonic clock."""
        self._began = time.monotonic()
        self._window: deque[float] = deque()
        """When identities were deleted, within the last identity-gc-rate-interval."""
        self._deleted = 0
        """In this pass."""
        self._passes = passes
        passes.expect(CRD)
        if settings.identity_gc_interval and objects.resources.endpoints:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            interval = min(settings.identity_gc_interval, SHORT_INTERVAL)
            self._due = time.monotonic() + settings.identity_gc_interval
            jobs.timer("identities", self.tick, interval)

    @property
    def crowded(self) -> bool:
        """Whether numbers run short."""
        return len(self._identities) > self._many

    async def tick(self) -> None:
        """A pass when one is due, or when numbers run short."""
        if time.monotonic() < self._due - 0.001 and not self.crowded:
            self._look()
            return
        self._due = time.monotonic() + self._settings.identity_gc_interval
        with self._passes.counted(CRD):
            await self.collect()

    def _look(self) -> None:
        """Remember which identities are in use now."""
        now = time.monotonic()
        for endpoint in self._endpoints.all():
            if endpoint.status.identity is not None:
                self._seen[str(endpoint.status.identity.id)] = now

    async def collect(self) -> None:
        """One pass. Raises KubernetesError."""
        await self._identities.wait_initialized()
        await self._endpoints.wait_initialized()
        self._look()
        timeout = float(self._settings.identity_heartbeat_timeout)
        if self.crowded:
            timeout = min(timeout, SHORT_TIMEOUT)
        now = time.monotonic()
        live = {name for name, seen in self._seen.items() if now - seen < timeout}
        self._seen = {name: seen for name, seen in self._seen.items() if name in live}
        unused = [one for one in self._identities.all() if one.name not in live]
        alive = len(self._identities) - len(unused)
        self._deleted = 0
        self._passes.found(CRD, alive=alive, deleted=0)
        if now - self._began < timeout:
            return  # endpoints may not be known again that are there
        waiting = iter(unused)
        failures: list[KubernetesError] = []

        async def work() -> None:
            while some := list(islice(waiting, IN_A_ROW)):
                failures.extend(await self._treat(some, timeout))

        async with anyio.create_task_group() as group:
            for _ in range(min(AT_ONCE, len(unused))):
                group.start_soon(work)
        self._passes.found(CRD, alive=alive, deleted=self._deleted)
        if self._deleted:
            self._log.info("identities without endpoints deleted", count=self._deleted, alive=alive)
        if failures:
            raise failures[0]

    async def _treat(self, identities: Iterable[ClusterIdentity], patience: float) -> list[KubernetesError]:
        """Mark or delete them; what failed. One that is used again, or deleted, is for the next pass."""
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
        """What is to become of it: marked, deleted, or None for nothing yet."""
        marked = _time(identity.annotations.get(HEARTBEAT))
        client, known = self._server.client, identity.metadata
        if marked is None:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            body = {"metadata": {"uid": known.uid, "annotations": {HEARTBEAT: stamp}}}
            return client.merge(CLUSTER_IDENTITIES, identity.name, body)
        if time.time() - marked < patience or not self._allowed():
            return None  # the next pass goes on
        # a write since then, as to take the mark away, prevents it
        return client.deletion(
            CLUSTER_IDENTITIES, identity.name, uid=known.uid, version=known.resource_version
        )

    def _allowed(self) -> bool:
        """Whether one more may be deleted now."""
        now = time.monotonic()
        while self._window and now - self._window[0] >= self._settings.identity_gc_rate_interval:
            self._window.popleft()
        if len(self._window) >= self._settings.identity_gc_rate_limit and not self.crowded:
            self._due = min(self._due, now + self._settings.identity_gc_rate_interval)
            return False
        self._window.append(now)
        return True


def _time(text: str | None) -> float | None:
    """Seconds since the epoch; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


# The metrics of garbage collection.
#
# Source: Cilium 1.17, metrics of the operator; runs and latency are gauges there.


def collect_metrics(
    metrics: Metrics, endpoints: CiliumEndpointGC, identities: IdentityPasses, lifecycle: Lifecycle
) -> None:
    """Report it while this operator leads."""

    async def collect() -> Iterable[MetricFamily]:
        return families(endpoints, identities)

    metrics.report(lifecycle, Collector("gc", collect))


def families(endpoints: CiliumEndpointGC, identities: IdentityPasses) -> list[MetricFamily]:
    """All of it."""
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
