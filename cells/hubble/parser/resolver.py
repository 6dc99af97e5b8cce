"""Names for flows: the agent's endpoints, identities, services and DNS names at one moment.

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
"""Nanoseconds after which a namespace without flows is dropped."""
_WITH_IDENTITIES: Final = frozenset((b"\1", b"\4"))
_VERDICT: Final = b"\5"
_MOST_PARTIES: Final = 1 << 16
_POLICY_LABEL = "k8s:io.cilium.k8s.policy."
_CRON_JOB = re.compile(r"(.+)-\d{8,10}")


class LocalEndpoint(msgspec.Struct, frozen=True):
    """The fields of an endpoint of this node that flows show."""

    id: int
    identity: int = 0
    namespace: str = ""
    pod_name: str = ""
    labels: Sequence[str] = ()
    workload: Workload | None = None


class EntryKey(msgspec.Struct, frozen=True):
    """An entry of a policy map."""

    identity: int
    """0: all peers."""
    port: int | None
    """None: all ports."""
    protocol: int


class DecidingRules(msgspec.Struct, frozen=True):
    """Labels of the rules of an entry in an endpoint's policy map, and their revision."""

    labels: Sequence[Sequence[str]]
    revision: int = 0


class Resolver(ABC):
    """Names at one moment: an instance always returns the same answers, so results may be cached."""

    def __init__(self) -> None:
        self._resolved: dict[tuple[str, int], FlowEndpoint] = {}

    @abstractmethod
    def local_endpoint(self, address: str) -> LocalEndpoint | None:
        """The endpoint of this node with the address."""

    @abstractmethod
    def endpoint(self, number: int) -> LocalEndpoint | None:
        """The endpoint of this node with the id."""

    @abstractmethod
    def identity_at(self, address: str) -> int:
        """The identity of an address; 0 if unknown."""

    @abstractmethod
    def pod_at(self, address: str) -> tuple[str, str]:
        """Namespace and name of the pod with the address, in any cluster; empty if there is none."""

    @abstractmethod
    def labels_of(self, identity: int) -> Sequence[str]:
        """Labels of an identity; empty if it is unknown."""

    @abstractmethod
    def service_at(self, address: str, port: int) -> FlowService | None:
        """The service with a frontend at the address, for any protocol."""

    @abstractmethod
    def names_at(self, endpoint: int, address: str) -> Sequence[str]:
        """Names of the address in DNS answers to the endpoint."""

    @abstractmethod
    def link_name(self, index: int) -> str:
        """The name of a network interface; empty if it is unknown."""

    @abstractmethod
    def addresses_of_cgroup(self, cgroup: int) -> Sequence[str]:
        """Addresses of the pod with a container in the cgroup; empty if there is none."""

    @abstractmethod
    def rules(self, endpoint: int, entry: EntryKey, address: str, *, egress: bool) -> DecidingRules | None:
        """The rules of an entry in the endpoint's policy map, or of the network around the address."""

    def party(self, address: str, identity: int) -> FlowEndpoint:
        """One side of a flow; the identity that the datapath reports (0 for none) comes before ours."""
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
    """The value of the label with this source and key; empty if there is none."""
    prefix = name + "="
    return next((label[len(prefix) :] for label in labels if label.startswith(prefix)), "")


def shown_labels(labels: Sequence[str], identity: int) -> tuple[str, ...]:
    """Labels sorted; for prefixes of a local identity, only the longest one."""
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
    """The workload of a pod, from its generateName, the kind and name of its controller, and its labels.

    None for a pod without a controller. The owners of a ReplicaSet, ReplicationController or Job are
    recognised by their names.
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
    """The policies of rules, without equal neighbours."""
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
    """Endpoints and identities in flows of the last hour, for the list of namespaces."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}
        self._named: dict[str, int] = {}

    def record(self, data: bytes, time: int) -> None:
        """Record the parties of a datapath record."""
        kind = data[:1]
        if kind in _WITH_IDENTITIES:  # the endpoint comes before them
            self._seen[data[2:4] + data[16:24]] = time
        elif kind == _VERDICT:  # has the other side's identity alone
            self._seen[data[2:4] + data[16:20]] = time
        if len(self._seen) > _MOST_PARTIES:
            self._forget(time)

    def flow(self, flow: Flow, time: int) -> None:
        """Record the namespaces of a flow."""
        for endpoint in (flow.source, flow.destination):
            if endpoint is not None and endpoint.namespace:
                self._named[endpoint.namespace] = time

    def namespaces(self, resolver: Resolver | None, now: int) -> list[str]:
        """Sorted, those of the last hour."""
        found = {name for name, seen in self._named.items() if now - seen <= NAMESPACE_AGE}
        for key, seen in self._seen.items():
            if resolver is not None and now - seen <= NAMESPACE_AGE:
                found.update(_namespaces_of(key, resolver))
        return sorted(found - {""})

    def _forget(self, now: int) -> None:
        """Drop entries older than an hour, and half of the maximum."""
        recent = sorted(self._seen.items(), key=lambda item: item[1])[-_MOST_PARTIES // 2 :]
        self._seen = {key: seen for key, seen in recent if now - seen <= NAMESPACE_AGE}


def _namespaces_of(key: bytes, resolver: Resolver) -> Iterator[str]:
    endpoint = resolver.endpoint(int.from_bytes(key[:2], "little"))
    if endpoint is not None:
        yield endpoint.namespace
    for at in range(2, len(key), 4):
        identity = int.from_bytes(key[at : at + 4], "little")
        yield label_value(resolver.labels_of(identity), NAMESPACE_LABEL)
