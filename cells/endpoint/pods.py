"""Labels and MAC addresses for endpoints, from the objects of pods and namespaces.

``KubernetesPods`` reads the tables of pods and namespaces, or requests a missing pod from the API server;
``creation`` and ``changes`` use it.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import anyio

from cells.base.labels import Label, pod_labels
from cells.config import AgentConfig
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.core import NAMESPACES, PODS, Namespace, Pod
from cells.kubernetes.settings import ObjectSource
from cells.policy.maps import KnownRules
from lifecycle import Logger, Table

# The interface to pod objects.


class PodName(NamedTuple):
    """Namespace, name and UID of a pod."""

    namespace: str
    name: str
    uid: str = ""
    """Distinguishes pods with the same name; empty if unknown."""


class PodFacts(NamedTuple):
    """The data of a pod that its new endpoint needs."""

    labels: list[Label]
    """All labels of the pod."""
    mac: str = ""
    """Value of the pod's MAC address annotation, unparsed; empty without one."""


class PodMetadata(Protocol):
    """The interface to labels and annotations of pods."""

    @property
    def cluster(self) -> str:
        """The name of the cluster, a label of every pod."""
        ...

    @property
    def followed(self) -> bool:
        """Whether a source of objects is configured; if not, requests contain the labels."""
        ...

    def lookup(self, pod: PodName) -> PodFacts | None:
        """Return labels and MAC address of the pod; None until its object is received."""
        ...

    async def resolve(self, pod: PodName) -> PodFacts | None:
        """Wait for the pod, with a timeout; None if it does not exist or no source answers."""
        ...


# The labels of this node's pods, from the tables of pods and namespaces.
#
# Controller: tables of pods and namespaces in, labels out.
# Source:     Cilium 1.17, the metadata of pods of new endpoints. While the API server can answer, a pod
#             without a received object must not become reserved:init (cilium/cilium issue 35993).

WATCH_SECONDS: Final = 2.0
"""Seconds to wait for the watch to receive a pod, before requesting it from the API server."""
METADATA_SECONDS: Final = 20.0
"""Total timeout for a pod in seconds. Without an answer its endpoint starts as reserved:init."""
MAC_ANNOTATION: Final = "cni.cilium.io/mac-address"
STATIC_POD: Final = "kubernetes.io/config.hash"
"""Annotation of a static pod's object with the UID that the kubelet uses; the object's own UID differs."""


class KubernetesPods:
    """Labels and MAC addresses from the tables of pods and namespaces, or from the API server.

    An endpoint without a pod object is reserved:init: denied unless a policy allows init. resolve() waits,
    because the watch may receive a pod shortly after the kubelet starts it. A directory of manifests is read
    as a whole, so missing pods are not awaited.
    """

    def __init__(
        self,
        agent: AgentConfig,
        source: ObjectSource,
        api: KubernetesAPI,
        pods: Table[tuple[str, str], Pod],
        namespaces: Table[tuple[str, str], Namespace],
        rules: KnownRules | None,
        log: Logger,
    ) -> None:
        self.followed = source is not ObjectSource.NOWHERE
        """Whether a source of objects is configured."""
        self._rules = rules if self.followed else None
        self._agent = agent
        self._folder = source is ObjectSource.MANIFESTS
        self._api = api
        self.pods = pods
        self.namespaces = namespaces
        self._log = log

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self._agent.cluster_name

    def lookup(self, pod: PodName) -> PodFacts | None:
        """Return labels and MAC address of the pod, or None.

        None until the pod, its namespace and all rules are received.
        """
        if self._rules is not None:
            if self._rules.missing:
                return None
            self._rules = None
        row, namespace = self.pods.get(pod[:2]), self.namespaces.get(("", pod.namespace))
        if row is None or not matches_uid(row, pod.uid):
            return None
        if namespace is None and not (self._folder and self.namespaces.initialized):
            return None
        return self._facts(pod.namespace, row, namespace)

    def of(self, namespace: str, name: str, uid: str) -> list[Label] | None:
        """Return all labels of a pod, or None until it, its namespace and all rules are received."""
        row = self.pods.get((namespace, name))
        if row is None or not matches_uid(row, uid):
            return None
        facts = self.lookup(PodName(namespace, name, uid))
        return None if facts is None else facts.labels

    def labels_of(self, pod: Pod) -> list[Label]:
        """Return all labels of a pod from its object and namespace, whether or not rules are received."""
        return self._labels(pod.namespace, pod, self.namespaces.get(("", pod.namespace)))

    async def resolve(self, pod: PodName) -> PodFacts | None:
        """Wait until the watch or a request to the API server returns the pod; None after the timeout."""
        with anyio.move_on_after(WATCH_SECONDS):
            await self.ready()
            if self._folder:
                await self.pods.wait_initialized()
                await self.namespaces.wait_initialized()
                if (found := self.lookup(pod)) is None:
                    self._log.warning(
                        "pod has no manifest: its endpoint starts as reserved:init",
                        pod=f"{pod.namespace}/{pod.name}",
                    )
                return found
            return await self._watched(pod)
        if self._folder:
            return self.lookup(pod)
        with anyio.move_on_after(METADATA_SECONDS - WATCH_SECONDS):
            await self.ready()
            answered, found = await self._requested(pod)
            if answered:
                return found
            return await self._watched(pod)
        self._log.warning(
            "Unable to fetch kubernetes labels: the endpoint starts as reserved:init",
            pod=f"{pod.namespace}/{pod.name}",
        )
        return None

    async def ready(self) -> None:
        """Wait until all rules are received: before, a pod with its labels could send what they deny."""
        if self._rules is not None:
            await self._rules.known()
            self._rules = None

    async def _watched(self, pod: PodName) -> PodFacts:
        while (found := self.lookup(pod)) is None:
            row = self.pods.get(pod[:2])
            if row is None or not matches_uid(row, pod.uid):
                await self.pods.wait_changed(pod[:2], row)
            else:
                await self.namespaces.wait_changed(("", pod.namespace), None)
        return found

    async def _requested(self, pod: PodName) -> tuple[bool, PodFacts | None]:
        """Request the pod from the API server.

        Returns whether the server answered, and the pod (None if missing).
        """
        from cells.kubernetes.client.errors import (  # loaded only with an API server
            KubernetesError,
            NotFoundError,
        )

        try:
            row = await self._api.client.get(PODS, pod.name, pod.namespace)
            namespace = await self._api.client.get(NAMESPACES, pod.namespace)
        except NotFoundError as error:
            self._log.warning("pod not found", pod=f"{pod.namespace}/{pod.name}", error=str(error))
            return True, None
        except KubernetesError as error:
            self._log.warning(
                "request for a pod to the API server failed",
                pod=f"{pod.namespace}/{pod.name}",
                error=str(error),
            )
            return False, None
        return True, self._facts(pod.namespace, row, namespace) if matches_uid(row, pod.uid) else None

    def _facts(self, name: str, pod: Pod, namespace: Namespace | None) -> PodFacts:
        return PodFacts(self._labels(name, pod, namespace), pod.annotations.get(MAC_ANNOTATION, ""))

    def _labels(self, name: str, pod: Pod, namespace: Namespace | None) -> list[Label]:
        account = pod.spec.service_account_name
        if self._folder:
            account = account or "default"  # the default that an API server sets
        return list(
            pod_labels(
                pod.labels,
                namespace=name,
                namespace_labels=namespace.labels if namespace is not None else {},
                service_account=account,
                cluster=self.cluster,
            )
        )


def matches_uid(row: Pod, uid: str) -> bool:
    """Whether the object is that of the pod with this UID; an empty UID matches any."""
    return not uid or row.metadata.uid in ("", uid) or row.annotations.get(STATIC_POD) == uid
