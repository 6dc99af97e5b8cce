"""Resolver interface of the flow parsers: endpoints, identities, pods, services and DNS names at one time.

``resolvers`` implements it on the agent's tables. Also: workloads of pods, and namespaces in recent flows.

Source: Cilium 1.17, the getters of Hubble's parser and pkg/hubble/parser/common.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from ipaddress import ip_network
from typing import Final

import msgspec

from cells.cluster.identity.numbers import Scope, scope_of
from cells.hubble.codec import share
from cells.hubble.flow import Flow, FlowEndpoint, FlowPolicy, FlowService, Workload

CLUSTER_LABEL = "k8s:io.cilium.k8s.policy.cluster"
NAMESPACE_LABEL: Final = "k8s:io.kubernetes.pod.namespace"
NAMESPACE_AGE: Final = 3600 * 1_000_000_000
"""Nanoseconds without flows after which a namespace is no longer listed."""
_WITH_IDENTITIES: Final = frozenset((b"\1", b"\4"))
_VERDICT: Final = b"\5"
_MAX_PARTIES: Final = 1 << 16
_POLICY_LABEL = "k8s:io.cilium.k8s.policy."
_CRON_JOB = re.compile(r"(.+)-\d{8,10}")


class LocalEndpoint(msgspec.Struct, frozen=True):
    """The properties of an endpoint of this node that flows contain."""

    id: int
    identity: int = 0
    namespace: str = ""
    pod_name: str = ""
    labels: Sequence[str] = ()
    workload: Workload | None = None


class EntryKey(msgspec.Struct, frozen=True):
    """The key of a policy map entry without direction."""

    identity: int
    """0 matches all peers."""
    port: int | None
    """None matches all ports."""
    protocol: int


class DecidingRules(msgspec.Struct, frozen=True):
    """The labels of the rules behind a policy map entry, and the policy revision."""

    labels: Sequence[Sequence[str]]
    revision: int = 0


class Resolver(ABC):
    """Resolves addresses and numbers to names at one time.

    An instance always returns the same results, so callers may cache them.
    """

    def __init__(self) -> None:
        self._resolved: dict[tuple[str, int], FlowEndpoint] = {}

    @abstractmethod
    def local_endpoint(self, address: str) -> LocalEndpoint | None:
        """Return the endpoint of this node with the address, or None."""

    @abstractmethod
    def endpoint(self, number: int) -> LocalEndpoint | None:
        """Return the endpoint of this node with the endpoint ID, or None."""

    @abstractmethod
    def identity_at(self, address: str) -> int:
        """Return the identity of an address from the ipcache; 0 if unknown."""

    @abstractmethod
    def pod_at(self, address: str) -> tuple[str, str]:
        """Return namespace and name of the pod with the address, in any cluster; empty if there is none."""

    @abstractmethod
    def labels_of(self, identity: int) -> Sequence[str]:
        """Return the labels of an identity; empty if it is unknown."""

    @abstractmethod
    def service_at(self, address: str, port: int) -> FlowService | None:
        """Return the service with a frontend at the address and port, for any protocol, or None."""

    @abstractmethod
    def names_at(self, endpoint: int, address: str) -> Sequence[str]:
        """Return the names for which DNS answers to the endpoint had the address."""

    @abstractmethod
    def link_name(self, index: int) -> str:
        """Return the name of a network interface; empty if it is unknown."""

    @abstractmethod
    def addresses_of_cgroup(self, cgroup: int) -> Sequence[str]:
        """Return the addresses of the pod that owns the cgroup; empty if there is none."""

    @abstractmethod
    def rules(self, endpoint: int, entry: EntryKey, address: str, *, egress: bool) -> DecidingRules | None:
        """Return the rules behind an entry of the endpoint's policy map, or None.

        ``address`` selects the entry of the CIDR around it if the identity has none.
        """

    def party(self, address: str, identity: int) -> FlowEndpoint:
        """Return the source or destination of a flow.

        An identity in the record takes precedence over that in the ipcache; 0 means that the record has none.
        """
        key = address, identity
        if (found := self._resolved.get(key)) is None:
            found = self._resolved[key] = share(self._party(address, identity))
        return found

    def _party(self, address: str, identity: int) -> FlowEndpoint:
        local = self.local_endpoint(address) if address else None
        if local is not None:
            identity = identity or local.identity
            return FlowEndpoint(
                ID=local.id,
                identity=identity,
                namespace=local.namespace,
                pod_name=local.pod_name,
                labels=shown_labels(local.labels, identity),
                workloads=(local.workload,) if local.workload is not None else (),
            )
        namespace = pod_name = ""
        if address:
            identity = identity or self.identity_at(address)
            namespace, pod_name = self.pod_at(address)
        labels = self.labels_of(identity)
        return FlowEndpoint(
            identity=identity,
            cluster_name=label_value(labels, CLUSTER_LABEL),
            namespace=namespace,
            pod_name=pod_name,
            labels=shown_labels(labels, identity),
        )


def label_value(labels: Sequence[str], name: str) -> str:
    """Return the value of the label with this ``source:key``; empty if there is none."""
    prefix = name + "="
    return next((label[len(prefix) :] for label in labels if label.startswith(prefix)), "")


def shown_labels(labels: Sequence[str], identity: int) -> tuple[str, ...]:
    """Return the sorted labels; of CIDR labels only the one with the longest prefix."""
    if scope_of(identity) != Scope.LOCAL:
        return tuple(sorted(labels))
    chosen: list[str] = []
    longest, widest = "", 0
    for label in labels:
        if not label.startswith("cidr:"):
            chosen.append(label)
            continue
        try:
            length = ip_network(label.removeprefix("cidr:").replace("-", ":"), strict=False).prefixlen
        except ValueError:
            continue
        if length > widest:
            longest, widest = label, length
    return tuple(sorted([*chosen, longest] if longest else chosen))


def workload_of(generate_name: str, owner: tuple[str, str] | None, labels: dict[str, str]) -> Workload | None:
    """Return the workload of a pod, or None for a pod without a controller.

    It follows from the pod's generateName, its labels, and kind and name of its controller. The Deployment of
    a ReplicaSet, the DeploymentConfig of a ReplicationController and the CronJob of a Job are derived from
    their names.
    """
    if not generate_name or owner is None:
        return None
    kind, name = owner
    if kind == "ReplicaSet" and (suffix := labels.get("pod-template-hash")) and name.endswith("-" + suffix):
        return Workload(name=name.removesuffix("-" + suffix), kind="Deployment")
    if kind == "ReplicationController" and (config := labels.get("deploymentconfig")):
        return Workload(name=config, kind="DeploymentConfig")
    if kind == "Job" and (job := _CRON_JOB.fullmatch(name)):
        return Workload(name=job[1], kind="CronJob")
    return Workload(name=name, kind=kind)


def policies_of(rules: DecidingRules) -> tuple[FlowPolicy, ...]:
    """Return the policies of the rules, without consecutive duplicates."""
    found: list[FlowPolicy] = []
    for labels in rules.labels:
        shown = tuple(sorted(labels, key=lambda label: label.partition(":")[2].partition("=")[0]))
        policy = FlowPolicy(
            name=label_value(labels, _POLICY_LABEL + "name"),
            namespace=label_value(labels, _POLICY_LABEL + "namespace"),
            kind=label_value(labels, _POLICY_LABEL + "derived-from"),
            labels=shown,
            revision=rules.revision,
        )
        if not found or found[-1] != policy:
            found.append(policy)
    return tuple(found)


class Parties:
    """Tracks endpoints and identities in flows of the last hour, for GetNamespaces."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}
        self._named: dict[str, int] = {}

    def record(self, data: bytes, time: int) -> None:
        """Track the endpoint and the identities of a datapath record."""
        kind = data[:1]
        if kind in _WITH_IDENTITIES:  # endpoint ID, then both identities
            self._seen[data[2:4] + data[16:24]] = time
        elif kind == _VERDICT:  # endpoint ID, then the remote identity
            self._seen[data[2:4] + data[16:20]] = time
        if len(self._seen) > _MAX_PARTIES:
            self._evict(time)

    def flow(self, flow: Flow, time: int) -> None:
        """Track the namespaces of a flow."""
        for endpoint in (flow.source, flow.destination):
            if endpoint is not None and endpoint.namespace:
                self._named[endpoint.namespace] = time

    def namespaces(self, resolver: Resolver | None, now: int) -> list[str]:
        """Return the namespaces of the last hour, sorted."""
        found = {name for name, seen in self._named.items() if now - seen <= NAMESPACE_AGE}
        for key, seen in self._seen.items():
            if resolver is not None and now - seen <= NAMESPACE_AGE:
                found.update(_namespaces_of(key, resolver))
        return sorted(found - {""})

    def _evict(self, now: int) -> None:
        """Evict entries older than an hour, and the oldest beyond half of the maximum."""
        recent = sorted(self._seen.items(), key=lambda item: item[1])[-_MAX_PARTIES // 2 :]
        self._seen = {key: seen for key, seen in recent if now - seen <= NAMESPACE_AGE}


def _namespaces_of(key: bytes, resolver: Resolver) -> Iterator[str]:
    endpoint = resolver.endpoint(int.from_bytes(key[:2], "little"))
    if endpoint is not None:
        yield endpoint.namespace
    for at in range(2, len(key), 4):
        identity = int.from_bytes(key[at : at + 4], "little")
        yield label_value(resolver.labels_of(identity), NAMESPACE_LABEL)
