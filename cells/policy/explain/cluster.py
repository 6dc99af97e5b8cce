"""A cluster described by a folder of manifests: its pods, their identities and their policies.

``hive policy`` explains and checks policies by it, without an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cells.base.addresses import IPAddress
from cells.base.labels import DEFAULT_FILTER, Label, pod_labels
from cells.kubernetes.manifest_parser import wrong_value
from cells.kubernetes.objects import KINDS
from cells.policy.compute import Redirect, SelectorPolicy
from cells.policy.compute.endpoint_policy import DirectionPolicy, Filter
from cells.policy.compute.policies import NamedPodPort
from cells.policy.compute.repository import Repository
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.explain import EnclosingPrefix
from cells.policy.labels import (
    FQDN,
    LabelSet,
    Prefix,
    canonical_name,
    contains,
    network_labels,
    parse_prefix,
    prefix_labels,
)
from cells.policy.rules import PROTOCOLS, Direction, PolicyError, PolicyOptions, RuleSource, Unenforced
from cells.policy.rules.peers import TranslationContext, references_service
from cells.policy.rules.schema import ServiceReference

if TYPE_CHECKING:
    import yaml

__all__ = ["BadFile", "Cluster", "ExplainedPod", "KnownPod", "Located", "read_folder"]


# Manifests of a folder, with the line of every field, so that messages can point to it.
#
# YAML and JSON files, with several documents and lists of objects.

SUFFIXES = (".yaml", ".yml", ".json")
_KINDS = {kind.kind: kind for kind in KINDS}
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class FileLine(msgspec.Struct, frozen=True, order=True):
    """A line of a file, 1-based."""

    file: str
    line: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Located(msgspec.Struct, frozen=True):
    """An object and its place in a file.

    ``lines`` maps the path of a field (``spec.ingress[0]``) to its 1-based line.
    """

    object: Mapping[str, Any]
    file: str
    lines: Mapping[str, int]

    def at(self, path: str) -> FileLine:
        """Return the place of a field, or of the nearest enclosing field."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return FileLine(self.file, self.lines.get(path, self.lines.get("", 1)))


class BadFile(msgspec.Struct, frozen=True):
    """A file or object that cannot be read, and the line of the error."""

    file: str
    reason: str
    line: int = 1


def read_folder(folder: Path) -> Iterator[Located | BadFile]:
    """Yield every object of the folder's manifests, in the order of files and documents. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            yield from read_file(path, str(path.relative_to(folder)))


def read_file(path: Path, name: str) -> Iterator[Located | BadFile]:
    """Yield every object of a file; after a syntax error, only the error."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        yield BadFile(name, f"byte {error.start}: not UTF-8")
        return
    import yaml  # imported here: the agent does not need it

    loader = yaml.CSafeLoader(text)
    loader.yaml_implicit_resolvers = {  # timestamps stay text, as in JSON
        first: [one for one in found if one[0] != _TIMESTAMP]
        for first, found in loader.yaml_implicit_resolvers.items()
    }
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            yield from _objects(loader.construct_document(node), node, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"column {mark.column + 1}: " if mark is not None else ""
        yield BadFile(name, f"{place}{error.problem or error}", mark.line + 1 if mark is not None else 1)
    finally:
        loader.dispose()


def _objects(document: Any, node: yaml.Node, file: str) -> Iterator[Located | BadFile]:
    from yaml import MappingNode

    if document is None:
        return
    if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
        yield BadFile(file, "expected a Kubernetes object with kind and metadata", node.start_mark.line + 1)
        return
    items = document.get("items")
    if document["kind"].endswith("List") and isinstance(items, list) and isinstance(node, MappingNode):
        listed = next(value for key, value in node.value if key.value == "items")
        for item, inner in zip(items, listed.value, strict=True):
            yield from _objects(item, inner, file)
        return
    located = Located(document, file, dict(_lines(node, "")))
    yield _object_error(located) or located


def _object_error(located: Located) -> BadFile | None:
    """Return why the agent would ignore an object. Policies are validated when they are translated."""
    kind = _KINDS.get(str(located.object["kind"]))
    if kind is None:
        return None
    version = located.object.get("apiVersion")
    if version != kind.api_version:
        place = located.at("apiVersion")
        text = f"{kind.kind} is read as {kind.api_version} only, not {version or 'without apiVersion'}"
        return BadFile(place.file, text, place.line)
    metadata = located.object.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        what = "missing" if name is None or name == "" else f"{name!r}, expected text"
        place = located.at("metadata.name")
        return BadFile(place.file, f"metadata.name of the {kind.kind} is {what}", place.line)
    try:
        row = kind.convert(located.object)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at ")
        path = at.strip("`").removeprefix("$").lstrip(".")
        place = located.at(path)
        shown = f"{path}: " if path else ""
        text = f"{kind.kind} {name}: {shown}{reason[:1].lower()}{reason[1:]}"
        return BadFile(place.file, text, place.line)
    if (wrong := wrong_value(kind, row)) is not None:
        path, reason = wrong[0].lstrip("."), wrong[1]
        place = located.at(path)
        return BadFile(place.file, f"{kind.kind} {name}: {path}: {reason}", place.line)
    return None


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    from yaml import MappingNode, SequenceNode

    yield path, node.start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            yield from _lines(value, inner)
            yield inner, key.start_mark.line + 1
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, f"{path}[{index}]")


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
FIRST_NETWORK_IDENTITY = FIRST_LOCAL_IDENTITY + (1 << 22)
"""First identity of prefixes around pods, if CIDR rules select pods."""
FIRST_NAMED_IDENTITY = FIRST_LOCAL_IDENTITY + (1 << 23)
"""First identity of addresses of DNS names."""


class ExplainedPod(NamedTuple):
    """A pod by namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class KnownPod(msgspec.Struct, frozen=True):
    """A pod with its identity and named ports."""

    name: ExplainedPod
    identity: int
    labels: LabelSet
    ports: frozenset[NamedPodPort]
    located: Located


class RejectedPolicy(msgspec.Struct, frozen=True):
    """A rejected policy, and the error."""

    located: Located
    error: PolicyError


class Cluster:
    """A cluster of the objects of a folder."""

    def __init__(self, objects: Iterable[Located | BadFile], options: PolicyOptions) -> None:
        self.options = options
        self.bad_files: list[BadFile] = []
        self.refused: list[RejectedPolicy] = []
        self.unenforced: list[tuple[Located, Unenforced]] = []
        """Parts of policies that are not enforced as written."""
        self.policies: dict[RuleSource, Located] = {}
        self.pods: dict[ExplainedPod, KnownPod] = {}
        self.cache = SelectorCache()
        self._by_kind: dict[str, list[Located]] = {}
        self._identities: dict[LabelSet, int] = {}
        self._cidr_identities: dict[Prefix, int] = {}
        self._pod_network_identities: dict[Prefix, int] = {}
        """Identities of prefixes around pods, if CIDR rules select pods."""
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
            one.object["metadata"]["name"]: tuple(self._group_prefixes(one))
            for one in self._by_kind.get("CiliumCIDRGroup", ())
        }
        services = _Services(self._by_kind.get("Service", ()), self._by_kind.get("EndpointSlice", ()))
        self.repository = Repository(TranslationContext(options, groups, services))
        for kind in POLICIES:
            for one in self._by_kind.get(kind, ()):
                self._add_policy(one)
        for prefix in sorted(self.repository.prefixes(), key=lambda one: (one.version, one)):
            if prefix.prefixlen:
                self._cidr_identities[prefix] = FIRST_LOCAL_IDENTITY + len(self._cidr_identities)
                self.cache.add_identity(
                    self._cidr_identities[prefix], prefix_labels(prefix, dual_stack=False)
                )
            if options.cidr_matches_pods:
                self._pod_network_identities[prefix] = FIRST_NETWORK_IDENTITY + len(
                    self._pod_network_identities
                )
                self.cache.add_identity(self._pod_network_identities[prefix], network_labels(prefix))

    def _group_prefixes(self, located: Located) -> Iterator[Prefix]:
        """Yield the prefixes of a CIDR group; report invalid ones and skip them, as agents do."""
        for index, text in enumerate((located.object.get("spec") or {}).get("externalCIDRs") or ()):
            try:
                yield parse_prefix(text)
            except ValueError as error:
                place = located.at(f"spec.externalCIDRs[{index}]")
                name = located.object["metadata"]["name"]
                reason = f"CiliumCIDRGroup {name}: spec.externalCIDRs[{index}]: {error}"
                self.bad_files.append(BadFile(place.file, reason, place.line))

    def objects(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the objects of a kind."""
        return [one.object for one in self._by_kind.get(kind, ())]

    def located(self, kind: str) -> list[Located]:
        """Return the objects of a kind with their places."""
        return self._by_kind.get(kind, [])

    def _add_pod(self, located: Located) -> None:
        metadata, spec = located.object["metadata"], located.object.get("spec") or {}
        name = ExplainedPod(metadata.get("namespace") or "default", metadata["name"])
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
            self.refused.append(RejectedPolicy(located, error))
        else:
            source = changed.rules[-1].source
            self.policies[source] = located
            for rule in self.repository.rules_of(source):
                self.unenforced += [(located, one) for one in rule.unenforced]

    def identity_of(self, network: Prefix) -> int:
        """Return the identity of addresses outside: that of the longest prefix in rules, else the world.

        Raises PolicyError if rules distinguish addresses in the network.
        """
        within = [
            prefix for prefix in self._cidr_identities if prefix != network and contains(network, prefix)
        ]
        if within:
            named = ", ".join(map(str, within[:3])) + (", ..." if len(within) > 3 else "")
            raise PolicyError(f"rules distinguish networks within {network}: give one of them ({named})")
        nearest = _longest_prefix(self._cidr_identities, network)
        return self._cidr_identities[nearest] if nearest is not None else RESERVED["world"]

    def around(self, address: IPAddress) -> EnclosingPrefix:
        """Return the longest prefix in rules around a pod's address, if CIDR rules select pods."""
        nearest = _longest_prefix(self._pod_network_identities, ip_network(address))
        if nearest is None:
            return EnclosingPrefix(address.version)
        number = self._pod_network_identities[nearest]
        return EnclosingPrefix(address.version, number, self.cache.identities[number])

    def identity_of_name(self, name: str) -> int:
        """Return the identity of an address of a DNS name; the world if no rule selects the name."""
        selecting = [one for one in self.repository.name_selectors if one.matches_name(canonical_name(name))]
        if not selecting:
            return RESERVED["world"]
        labels = LabelSet([Label("reserved", "world"), *(Label(FQDN, one.text) for one in selecting)])
        known = self._identities.get(labels)
        if known is None:
            known = self._identities[labels] = FIRST_NAMED_IDENTITY + len(self._identities)
            self.cache.add_identity(known, labels)
        return known

    def policy(
        self, pod: KnownPod, direction: Direction, repository: Repository | None = None
    ) -> DirectionPolicy:
        """Return the policy of one direction of a pod. Raises PolicyConflictError."""
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

    def _cluster_ports(self) -> frozenset[NamedPodPort]:
        return frozenset(port for pod in self.pods.values() for port in pod.ports)


def _longest_prefix(prefixes: Iterable[Prefix], network: Prefix) -> Prefix | None:
    """Return the longest of the prefixes that contain a network, or None."""
    around = [prefix for prefix in prefixes if contains(prefix, network)]
    return max(around, key=lambda one: one.prefixlen) if around else None


def _proxy(filter_: Filter, policy: SelectorPolicy) -> Redirect:
    return Redirect(policy.listener.priority if policy.listener else 0, 0, policy.parser or filter_.parser)


def _named_ports(spec: Mapping[str, Any]) -> Iterator[NamedPodPort]:
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for port in container.get("ports") or ():
            if port.get("name"):
                yield NamedPodPort(
                    port["name"], PROTOCOLS[port.get("protocol", "TCP")], port["containerPort"]
                )


class _Services:
    """Backends of the folder's services without a selector, for ``toServices``."""

    def __init__(self, services: Iterable[Located], slices: Iterable[Located]) -> None:
        self._services = [one.object for one in services]
        self._slices = [one.object for one in slices]

    def prefixes(self, reference: ServiceReference) -> Iterator[Prefix]:
        """Yield the backend addresses of the referenced services."""
        for service in self._services:
            metadata = service["metadata"]
            if (service.get("spec") or {}).get("selector") or not _is_referenced(reference, metadata):
                continue
            for slice_ in self._slices:
                of = slice_["metadata"]
                name = (of.get("labels") or {}).get("kubernetes.io/service-name")
                if (of.get("namespace"), name) != (metadata.get("namespace"), metadata["name"]):
                    continue
                for endpoint in slice_.get("endpoints") or ():
                    yield from (ip_network(address) for address in endpoint["addresses"])


def _is_referenced(reference: ServiceReference, metadata: Mapping[str, Any]) -> bool:
    labels = {key: str(value) for key, value in (metadata.get("labels") or {}).items()}
    return references_service(reference, metadata.get("namespace") or "default", metadata["name"], labels)
