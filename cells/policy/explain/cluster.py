"""A cluster as a folder of manifests describes it: pods, their identities, and the policies for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any, NamedTuple

import msgspec

from cells.cluster.identity import DEFAULT_FILTER, Label, pod_labels
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.entries import Redirect
from cells.policy.compute.filters import Filter
from cells.policy.compute.policies import NamedPort
from cells.policy.compute.repository import Repository
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.compute.selector_policy import SelectorPolicy
from cells.policy.explain.files import BadFile, Located
from cells.policy.labels import LabelSet, Prefix, canonical_name, prefix_labels
from cells.policy.labels.cidr import contains
from cells.policy.labels.label import FQDN
from cells.policy.rules import Direction, PolicyError, PolicyOptions, Source, Unenforced, World
from cells.policy.rules.peers import means_service
from cells.policy.rules.rule import PROTOCOLS
from cells.policy.rules.schema import ServiceReference

POLICIES = ("NetworkPolicy", "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy")
RESERVED = {
    "host": 1,
    "world": 2,
    "unmanaged": 3,
    "health": 4,
    "init": 5,
    "remote-node": 6,
    "kube-apiserver": 7,
    "ingress": 8,
}
FIRST_POD_IDENTITY = 1000
FIRST_LOCAL_IDENTITY = 1 << 24
FIRST_NAMED_IDENTITY = FIRST_LOCAL_IDENTITY + (1 << 23)
"""Of addresses that names have."""


class PodName(NamedTuple):
    """A pod."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class KnownPod(msgspec.Struct, frozen=True):
    """A pod, its identity and its named ports."""

    name: PodName
    identity: int
    labels: LabelSet
    ports: frozenset[NamedPort]
    located: Located


class Refused(msgspec.Struct, frozen=True):
    """A policy that was refused, and why."""

    located: Located
    error: PolicyError


class Cluster:
    """Objects of a folder, taken in at once."""

    def __init__(self, objects: Iterable[Located | BadFile], options: PolicyOptions) -> None:
        self.options = options
        self.bad_files: list[BadFile] = []
        self.refused: list[Refused] = []
        self.unenforced: list[tuple[Located, Unenforced]] = []
        """Parts of policies that are in force otherwise than they are written."""
        self.policies: dict[Source, Located] = {}
        self.pods: dict[PodName, KnownPod] = {}
        self.cache = SelectorCache()
        self._by_kind: dict[str, list[Located]] = {}
        self._identities: dict[LabelSet, int] = {}
        self._local: dict[Prefix, int] = {}
        for one in objects:
            if isinstance(one, BadFile):
                self.bad_files.append(one)
            else:
                self._by_kind.setdefault(one.object["kind"], []).append(one)
        self._namespaces = {
            one.object["metadata"]["name"]: one.object["metadata"].get("labels") or {}
            for one in self._by_kind.get("Namespace", ())
        }
        for name, number in RESERVED.items():
            self.cache.add_identity(number, LabelSet([Label("reserved", name)]))
        for one in self._by_kind.get("Pod", ()):
            self._add_pod(one)
        groups = {
            one.object["metadata"]["name"]: tuple(_prefixes(one.object.get("spec") or {}))
            for one in self._by_kind.get("CiliumCIDRGroup", ())
        }
        services = _Services(self._by_kind.get("Service", ()), self._by_kind.get("EndpointSlice", ()))
        self.repository = Repository(World(options, groups, services))
        for kind in POLICIES:
            for one in self._by_kind.get(kind, ()):
                self._add_policy(one)
        for prefix in sorted(self.repository.prefixes(), key=lambda one: (one.version, one)):
            if prefix.prefixlen:
                self._local[prefix] = FIRST_LOCAL_IDENTITY + len(self._local)
                self.cache.add_identity(self._local[prefix], prefix_labels(prefix, dual_stack=False))

    def objects(self, kind: str) -> list[Mapping[str, Any]]:
        """The objects of a kind."""
        return [one.object for one in self._by_kind.get(kind, ())]

    def located(self, kind: str) -> list[Located]:
        """The objects of a kind, and where they are written."""
        return self._by_kind.get(kind, [])

    def _add_pod(self, located: Located) -> None:
        metadata, spec = located.object["metadata"], located.object.get("spec") or {}
        name = PodName(metadata.get("namespace") or "default", metadata["name"])
        if spec.get("hostNetwork"):
            return
        every = pod_labels(
            {key: str(value) for key, value in (metadata.get("labels") or {}).items()},
            namespace=name.namespace,
            namespace_labels={
                key: str(value) for key, value in self._namespaces.get(name.namespace, {}).items()
            },
            service_account=spec.get("serviceAccountName") or "default",
            cluster=self.options.cluster_name,
        )
        labels = LabelSet(DEFAULT_FILTER.split(every)[0])
        identity = self._identities.setdefault(labels, FIRST_POD_IDENTITY + len(self._identities))
        if identity not in self.cache.identities:
            self.cache.add_identity(identity, labels)
        self.pods[name] = KnownPod(name, identity, labels, frozenset(_named_ports(spec)), located)

    def _add_policy(self, located: Located) -> None:
        try:
            changed = self.repository.apply(located.object)
        except PolicyError as error:
            self.refused.append(Refused(located, error))
        else:
            source = changed.rules[-1].source
            self.policies[source] = located
            for rule in self.repository.rules_of(source):
                self.unenforced += [(located, one) for one in rule.unenforced]

    def identity_of(self, network: Prefix) -> int:
        """The identity of addresses outside: of the nearest prefix that a rule names, else the world.

        Raises PolicyError where rules tell some of the addresses from others.
        """
        within = [prefix for prefix in self._local if prefix != network and contains(network, prefix)]
        if within:
            named = ", ".join(map(str, within[:3])) + (", ..." if len(within) > 3 else "")
            raise PolicyError(f"rules name networks within {network}: ask for one of them ({named})")
        around = [prefix for prefix in self._local if contains(prefix, network)]
        return self._local[max(around, key=lambda one: one.prefixlen)] if around else RESERVED["world"]

    def identity_named(self, name: str) -> int:
        """The identity of an address that DNS has answered for a name; the world's if no rule means it."""
        selecting = [one for one in self.repository.name_selectors if one.matches_name(canonical_name(name))]
        if not selecting:
            return RESERVED["world"]
        labels = LabelSet([Label("reserved", "world"), *(Label(FQDN, one.text) for one in selecting)])
        known = self._identities.get(labels)
        if known is None:
            known = self._identities[labels] = FIRST_NAMED_IDENTITY + len(self._identities)
            self.cache.add_identity(known, labels)
        return known

    def named(self, identity: int) -> str:
        """An identity in words."""
        pods = [str(pod.name) for pod in self.pods.values() if pod.identity == identity]
        if pods:
            return pods[0] if len(pods) == 1 else f"{pods[0]} and {len(pods) - 1} like it"
        return ", ".join(map(str, self.cache.identities[identity]))

    def policy(
        self, pod: KnownPod, direction: Direction, repository: Repository | None = None
    ) -> DirectionPolicy:
        """What holds for a direction of a pod. Raises PolicyConflictError."""
        resolved = (repository or self.repository).resolve(pod.labels, direction)
        policy = DirectionPolicy(
            direction,
            resolved.filters,
            self.cache,
            enforced=resolved.enforced,
            named_ports=lambda name, protocol: {
                one.port
                for one in (pod.ports if direction == "ingress" else self._cluster_ports())
                if one.name == name and one.protocol == protocol
            },
            proxies=_proxy,
            localhost=direction == "ingress" and self.options.always_allows_localhost,
        )
        for peer in policy.peers:
            self.cache.add_selector(peer)
        return policy

    def _cluster_ports(self) -> frozenset[NamedPort]:
        return frozenset(port for pod in self.pods.values() for port in pod.ports)


def _proxy(filter_: Filter, policy: SelectorPolicy) -> Redirect:
    return Redirect(policy.listener.priority if policy.listener else 0, 0, policy.parser or filter_.parser)


def _prefixes(spec: Mapping[str, Any]) -> Iterator[Prefix]:
    for text in spec.get("externalCIDRs") or ():
        yield ip_network(text, strict=False)


def _named_ports(spec: Mapping[str, Any]) -> Iterator[NamedPort]:
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for port in container.get("ports") or ():
            if port.get("name"):
                yield NamedPort(port["name"], PROTOCOLS[port.get("protocol", "TCP")], port["containerPort"])


class _Services:
    """The services of the folder: those without a selector stand for their backends' addresses."""

    def __init__(self, services: Iterable[Located], slices: Iterable[Located]) -> None:
        self._services = [one.object for one in services]
        self._slices = [one.object for one in slices]

    def prefixes(self, reference: ServiceReference) -> Iterator[Prefix]:
        """The addresses behind the services meant."""
        for service in self._services:
            metadata = service["metadata"]
            if (service.get("spec") or {}).get("selector") or not _is_meant(reference, metadata):
                continue
            for slice_ in self._slices:
                of = slice_["metadata"]
                name = (of.get("labels") or {}).get("kubernetes.io/service-name")
                if (of.get("namespace"), name) != (metadata.get("namespace"), metadata["name"]):
                    continue
                for endpoint in slice_.get("endpoints") or ():
                    yield from (ip_network(address) for address in endpoint["addresses"])


def _is_meant(reference: ServiceReference, metadata: Mapping[str, Any]) -> bool:
    labels = {key: str(value) for key, value in (metadata.get("labels") or {}).items()}
    return means_service(reference, metadata.get("namespace") or "default", metadata["name"], labels)
