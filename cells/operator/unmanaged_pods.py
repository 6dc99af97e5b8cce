"""Deletes pods without an endpoint, because they started before the agent, so that they are recreated.

Often cluster DNS starts first, on another network: it has no policy, and other pods cannot reach it. Pods are
compared with CiliumEndpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Final

from msgspec import Meta

from cells.base.metrics import Collector, MetricFamily, gauge
from cells.kubernetes.client.errors import ConflictError
from cells.kubernetes.objects.cilium_endpoint import CILIUM_ENDPOINTS
from cells.kubernetes.objects.kind import Key, LabelSelector, selector_of
from cells.observe.metrics import Metrics
from cells.operator.api_server import ClusterAPI
from cells.operator.objects import CLUSTER_PODS, ClusterObjects, ClusterPod
from lifecycle import Jobs, Lifecycle, Logger, Settings, config, invoke, module, provide

__all__ = ["UnmanagedPodSettings", "UnmanagedPods", "cell"]


# Finds pods without an endpoint and deletes one per pass.
#
# Source: Cilium 1.17, operator/watchers/pod: one pod per pass, none younger than 30 s, none twice in 5
# minutes.

YOUNG: Final = 30.0
"""Minimum age in seconds of a pod that is restarted."""
AGAIN: Final = 300.0
"""Seconds between two deletions of pods with one name."""


class UnmanagedPodSettings(Settings, frozen=True):
    """Settings of the unmanaged-pods cell."""

    unmanaged_pod_watcher_interval: Annotated[int, Meta(ge=0)] = 15
    """Seconds between passes over pods without an endpoint; 0: never."""

    pod_restart_selector: str = "k8s-app=kube-dns"
    """Label selector of the pods that may be restarted; empty: all pods."""

    def faults(self) -> Iterator[str]:
        try:
            self.pods()
        except ValueError as error:
            yield f"pod-restart-selector={self.pod_restart_selector}: {error}"

    def pods(self) -> LabelSelector:
        """Parse the selector. Raises ValueError."""
        return selector_of(self.pod_restart_selector)


class UnmanagedPods:
    """Restarts one pod without an endpoint every unmanaged-pod-watcher-interval."""

    def __init__(
        self,
        settings: UnmanagedPodSettings,
        server: ClusterAPI,
        objects: ClusterObjects,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._server = server
        self._log = log
        self._deleted: dict[Key, float] = {}
        self.found = 0
        """Number of pods without an endpoint in the last pass."""
        self.active = settings.unmanaged_pod_watcher_interval > 0 and objects.resources.endpoints
        if self.active:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            selector = settings.pods()
            self._pods = objects.table(CLUSTER_PODS).filter(
                lambda pod: selector.matches(pod.labels), name="restartable-pods"
            )
            jobs.timer("restart", self.restart_one, float(settings.unmanaged_pod_watcher_interval))

    async def restart_one(self) -> None:
        """Run one pass. Raises KubernetesError."""
        await self._pods.wait_initialized()
        await self._endpoints.wait_initialized()
        now = time.time()
        found = [pod for pod in self._pods.all() if self._unmanaged(pod, now)]
        self.found = len(found)
        self._deleted = {key: at for key, at in self._deleted.items() if now - at < AGAIN}
        for pod in found:
            if pod.key in self._deleted:
                continue
            self._deleted[pod.key] = now
            self._log.info("restarting a pod without an endpoint", pod="/".join(pod.key))
            try:
                await self._server.client.delete(CLUSTER_PODS, pod.name, pod.namespace, uid=pod.metadata.uid)
            except ConflictError:
                continue  # recreated meanwhile
            return

    def _unmanaged(self, pod: ClusterPod, now: float) -> bool:
        return (
            pod.status.phase == "Running"
            and not pod.spec.host_network
            and not pod.terminating
            and self._endpoints.get(pod.key) is None
            and now - _started(pod, now) >= YOUNG
        )


def _started(pod: ClusterPod, otherwise: float) -> float:
    """Return when a pod started, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(pod.status.start_time or "").timestamp()
    except ValueError:
        return otherwise


def collect_metrics(metrics: Metrics, pods: UnmanagedPods, lifecycle: Lifecycle) -> None:
    """Report the number of unmanaged pods while this operator leads."""

    async def collect() -> Iterable[MetricFamily]:
        return [gauge("cilium_operator_unmanaged_pods", "Pods that run without an endpoint.", pods.found)]

    if pods.active:
        metrics.report(lifecycle, Collector("unmanaged-pods", collect))


cell = module(
    "unmanaged-pods",
    "Pods that run without an endpoint",
    config(UnmanagedPodSettings),
    provide(UnmanagedPods),
    invoke(collect_metrics),
)
