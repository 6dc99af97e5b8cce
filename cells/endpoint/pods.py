"""What pods' and namespaces' objects say of endpoints: their labels and MAC addresses."""

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

# What endpoints need from pods' objects.


class PodName(NamedTuple):
    """Which pod is meant."""

    namespace: str
    name: str
    uid: str = ""
    """Distinguishes pods of the same name; empty if unknown."""


class PodFacts(NamedTuple):
    """What a new endpoint takes from its pod."""

    labels: list[Label]
    """Every label of the pod."""
    mac: str = ""
    """The MAC address that the pod's annotation asks for, as it is written; empty without one."""


class PodMetadata(Protocol):
    """The labels and annotations of pods, from wherever objects come."""

    @property
    def cluster(self) -> str:
        """The name of the cluster, which is on every pod."""
        ...

    @property
    def followed(self) -> bool:
        """Whether there is a source of objects; else an endpoint has the labels its request brings."""
        ...

    def lookup(self, pod: PodName) -> PodFacts | None:
        """The pod's; None while it is not known."""
        ...

    async def resolve(self, pod: PodName) -> PodFacts | None:
        """Wait for them for a limited time; None if there is no such pod, or no source answers."""
        ...


# The labels of this node's pods, from the tables of pods and namespaces.
#
# Controller: two tables in, labels out.
# Source:     Cilium 1.17, the metadata of pods when an endpoint is made. A pod without its object yet must
#             not be given reserved:init while the API server can answer (cilium/cilium issue 35993).

WATCH_SECONDS: Final = 2.0
"""How long the watch has to bring a pod, before the API server is asked for it."""
METADATA_SECONDS: Final = 20.0
"""How long a pod is waited for in all. Without an answer its endpoint begins with reserved:init."""
MAC_ANNOTATION: Final = "cni.cilium.io/mac-address"
STATIC_POD: Final = "kubernetes.io/config.hash"
"""Annotation of a static pod's object: what kubelet calls its UID is here, the object has another one."""


class KubernetesPods:
    """Pods' labels and MAC addresses as their objects say them.

    A pod without an object has none: its endpoint is reserved:init, denied unless a policy allows init.
    The API server may report a pod a moment after the kubelet runs it, so this waits; a folder of manifests
    is read as a whole, and what it does not have is not waited for.
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
        """Whether there is a source of objects."""
        self._rules = rules if self.followed else None
        self._agent = agent
        self._folder = source is ObjectSource.MANIFESTS
        self._api = api
        self.pods = pods
        self.namespaces = namespaces
        self._log = log

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self._agent.cluster_name

    def lookup(self, pod: PodName) -> PodFacts | None:
        """The pod's; None while it, or its namespace, or the rules for it are not known."""
        if self._rules is not None:
            if self._rules.missing:
                return None
            self._rules = None
        row, namespace = self.pods.get(pod[:2]), self.namespaces.get(("", pod.namespace))
        if row is None or not is_meant(row, pod.uid):
            return None
        if namespace is None and not (self._folder and self.namespaces.initialized):
            return None
        return self._facts(pod.namespace, row, namespace)

    def of(self, namespace: str, name: str, uid: str) -> list[Label] | None:
        """Every label of a pod that there is an object of; None without one: what was known stays."""
        row = self.pods.get((namespace, name))
        if row is None or not is_meant(row, uid):
            return None
        facts = self.lookup(PodName(namespace, name, uid))
        return None if facts is None else facts.labels

    def labels_of(self, pod: Pod) -> list[Label]:
        """Every label that objects give a pod, whether or not the rules are known."""
        return self._labels(pod.namespace, pod, self.namespaces.get(("", pod.namespace)))

    async def resolve(self, pod: PodName) -> PodFacts | None:
        """Wait until the watch or a request to the API server brings the pod; None if neither does."""
        with anyio.move_on_after(WATCH_SECONDS):
            await self.ready()
            if self._folder:
                await self.pods.wait_initialized()
                await self.namespaces.wait_initialized()
                if (found := self.lookup(pod)) is None:
                    self._log.warning(
                        "no manifest of a pod: its endpoint begins with reserved:init",
                        pod=f"{pod.namespace}/{pod.name}",
                    )
                return found
            return await self._watched(pod)
        if self._folder:
            return self.lookup(pod)
        with anyio.move_on_after(METADATA_SECONDS - WATCH_SECONDS):
            await self.ready()
            answered, found = await self._asked(pod)
            if answered:
                return found
            return await self._watched(pod)
        self._log.warning(
            "Unable to fetch kubernetes labels: the endpoint begins with reserved:init",
            pod=f"{pod.namespace}/{pod.name}",
        )
        return None

    async def ready(self) -> None:
        """Wait until the rules are known: before, a pod would be let do what they forbid."""
        if self._rules is not None:
            await self._rules.known()
            self._rules = None

    async def _watched(self, pod: PodName) -> PodFacts:
        while (found := self.lookup(pod)) is None:
            row = self.pods.get(pod[:2])
            if row is None or not is_meant(row, pod.uid):
                await self.pods.wait_changed(pod[:2], row)
            else:
                await self.namespaces.wait_changed(("", pod.namespace), None)
        return found

    async def _asked(self, pod: PodName) -> tuple[bool, PodFacts | None]:
        """Whether the API server has answered, and the pod that it has; None without one."""
        from cells.kubernetes.client.errors import (  # loaded where there is a server
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
                "asking the API server for a pod failed", pod=f"{pod.namespace}/{pod.name}", error=str(error)
            )
            return False, None
        return True, self._facts(pod.namespace, row, namespace) if is_meant(row, pod.uid) else None

    def _facts(self, name: str, pod: Pod, namespace: Namespace | None) -> PodFacts:
        return PodFacts(self._labels(name, pod, namespace), pod.annotations.get(MAC_ANNOTATION, ""))

    def _labels(self, name: str, pod: Pod, namespace: Namespace | None) -> list[Label]:
        account = pod.spec.service_account_name
        if self._folder:
            account = account or "default"  # an API server would have put it there
        return list(
            pod_labels(
                pod.labels,
                namespace=name,
                namespace_labels=namespace.labels if namespace is not None else {},
                service_account=account,
                cluster=self.cluster,
            )
        )


def is_meant(row: Pod, uid: str) -> bool:
    """Whether the object is that of the pod with this UID; without one on either side it is."""
    return not uid or row.metadata.uid in ("", uid) or row.annotations.get(STATIC_POD) == uid
