"""Replays a recorded case of policy computation on our engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from ipaddress import ip_network
from typing import Any, Final

import msgspec

from cells.policy.compute import Entry, Key, PortKey, Redirect, SelectorPolicy
from cells.policy.compute.endpoint_policy import DirectionPolicy, Filter
from cells.policy.compute.map_state import Entries
from cells.policy.compute.repository import Repository
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.labels import LabelSet, Prefix
from cells.policy.rules import PROTOCOLS, Direction, PolicyError, PolicyOptions, RuleSource, Unenforced
from cells.policy.rules.peers import TranslationContext, label_selector
from cells.policy.rules.schema import ServiceReference
from cells.policy.selectors import Selector
from tests.support.recordings import recordings

DATA: Final = recordings("policy")
DIRECTIONS: Final[tuple[Direction, ...]] = ("ingress", "egress")
PROTOCOL_NAMES: Final = {0: "ANY", 1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 132: "SCTP"}
PROTOCOL_NUMBERS: Final = {name: number for number, name in PROTOCOL_NAMES.items()}
POLICIES: Final = ("NetworkPolicy", "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy")
HTTP_PROXY_PORT: Final = 10001

EVERYTHING: Final = PolicyOptions()
"""Settings of the recorded engine: proxies for all protocols, and mutual authentication."""

Json = Any


@cache
def load(name: str) -> Json:
    """Load a recording."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the names of all recorded cases."""
    return sorted(path.stem for path in DATA.glob("*.json") if path.stem != "tables")


class RecordedServices:
    """The services of a case; rules use only those without selector."""

    def __init__(self) -> None:
        self.services: dict[tuple[str, str], Json] = {}
        self.slices: dict[tuple[str, str], Json] = {}

    def prefixes(self, reference: ServiceReference) -> Iterable[Prefix]:
        """Return the backend addresses of the selected services."""
        for (namespace, name), service in self.services.items():
            if service["spec"].get("selector") or not self._meant(reference, namespace, name, service):
                continue
            for slice_ in self.slices.values():
                labels = slice_["metadata"].get("labels", {})
                if (
                    slice_["metadata"]["namespace"] == namespace
                    and labels.get("kubernetes.io/service-name") == name
                ):
                    for endpoint in slice_.get("endpoints") or ():
                        for address in endpoint["addresses"]:
                            yield ip_network(address)

    @staticmethod
    def _meant(reference: ServiceReference, namespace: str, name: str, service: Json) -> bool:
        by_name, by_labels = reference.k8s_service, reference.k8s_service_selector
        if by_name is not None:
            return by_name.service_name == name and by_name.namespace in ("", namespace)
        if by_labels is not None and by_labels.namespace in ("", namespace):
            selector: Selector = label_selector(by_labels.selector)
            labels = service["metadata"].get("labels") or {}
            return selector.matches(LabelSet.parse(f"k8s:{key}={value}" for key, value in labels.items()))
        return False


class Case:
    """The state of one recorded case: objects applied, identities known."""

    def __init__(self, name: str, served: PolicyOptions = EVERYTHING) -> None:
        self.name = name
        self.recording = load(name)
        config = self.recording["config"]
        self.options = msgspec.structs.replace(
            served,
            cluster_name=config["cluster-name"],
            enable_ipv4=config["enable-ipv4"],
            enable_ipv6=config["enable-ipv6"],
            enable_policy=config["enable-policy"],
            allow_localhost=config["allow-localhost"],
            enable_host_firewall=config["enable-host-firewall"],
            enable_icmp_rules=config["enable-icmp-rules"],
            enable_l7_proxy=config["enable-l7-proxy"],
            enable_node_selector_labels=config["enable-node-selector-labels"],
        )
        self.groups: dict[str, tuple[Prefix, ...]] = {}
        self.services = RecordedServices()
        self.repository = Repository(self._context())
        self.cache = SelectorCache()
        self.labels = {one["id"]: LabelSet.parse(one["labels"]) for one in self.recording["identities"]}
        for identity, labels in self.labels.items():
            self.cache.add_identity(identity, labels)

    def _context(self) -> TranslationContext:
        return TranslationContext(self.options, dict(self.groups), self.services)

    def import_objects(self) -> list[PolicyError | None]:
        """Apply every object of the start, as the recording's ``imports`` list them."""
        return [self.apply(one) for one in self.recording["objects"]]

    @property
    def unenforced(self) -> list[Unenforced]:
        """Return the parts of the objects that are not enforced as written."""
        return [one for rule in self.repository.rules for one in rule.unenforced]

    def apply(self, object_: Json) -> PolicyError | None:
        """Apply one object; return why a policy is refused."""
        metadata = object_["metadata"]
        match object_["kind"]:
            case "CiliumCIDRGroup":
                self.groups[metadata["name"]] = tuple(
                    ip_network(text, strict=False) for text in object_["spec"]["externalCIDRs"]
                )
                self.repository.follow(self._context())
            case "Service":
                self.services.services[metadata["namespace"], metadata["name"]] = object_
                self.repository.follow(self._context())
            case "EndpointSlice":
                self.services.slices[metadata["namespace"], metadata["name"]] = object_
                self.repository.follow(self._context())
            case _:
                try:
                    self.repository.apply(object_)
                except PolicyError as error:
                    return error
        return None

    def delete(self, object_: Json) -> None:
        """Delete one object."""
        metadata = object_["metadata"]
        name, namespace = metadata["name"], metadata.get("namespace", "")
        match object_["kind"]:
            case "CiliumCIDRGroup":
                del self.groups[name]
                self.repository.follow(self._context())
            case "Service":
                del self.services.services[namespace, name]
                self.repository.follow(self._context())
            case "EndpointSlice":
                del self.services.slices[namespace, name]
                self.repository.follow(self._context())
            case kind:
                self.repository.delete(RuleSource(kind, namespace, name))

    def add_identity(self, recorded: Json) -> None:
        """Add an identity."""
        self.cache.add_identity(recorded["id"], LabelSet.parse(recorded["labels"]))

    def policy(self, endpoint: Json, direction: Direction) -> DirectionPolicy:
        """Return one direction of an endpoint's policy, for the identities known now."""
        labels = self.cache.identities[endpoint["identity"]]
        resolved = self.repository.resolve(labels, direction)
        for filter_ in resolved.filters:
            for peer in filter_.selectors:
                self.cache.add_selector(peer)
        is_host = labels.has_reserved("host")
        return DirectionPolicy(
            direction,
            resolved.filters,
            self.cache,
            enforced=resolved.enforced,
            named_ports=lambda name, protocol: self._named_ports(endpoint, direction, name, protocol),
            proxies=self._proxy,
            dual_stack=self.options.dual_stack,
            localhost=direction == "ingress" and self.options.always_allows_localhost and not is_host,
        )

    def _named_ports(self, endpoint: Json, direction: Direction, name: str, protocol: int) -> Iterator[int]:
        own = endpoint.get("named_ports") or {}
        everywhere = [
            *(one["ports"] for one in self.recording["pod_named_ports"]),
            *((one.get("named_ports") or {}) for one in self.recording["endpoints"]),
        ]
        for ports in [own] if direction == "ingress" else everywhere:
            port = ports.get(name)
            if port is not None and PROTOCOLS[port["protocol"]] == protocol:
                yield port["port"]

    def _proxy(self, filter_: Filter, policy: SelectorPolicy) -> Redirect | None:
        if policy.listener is not None:
            name = policy.listener.name
            if name in self.recording.get("missing_listeners", ()):
                return None
            port = HTTP_PROXY_PORT + 10 + sum(name.encode()) % 100
            return Redirect(policy.listener.priority or port, port, name)
        kind = policy.parser if policy.parser in ("http", "dns") else "proxylib"
        name = f"cilium-{kind}-{filter_.direction}"
        port = HTTP_PROXY_PORT + ("http", "dns", "proxylib").index(kind)
        return Redirect(port, port, name)

    def entries(self, endpoint: Json) -> dict[tuple[Direction, Key], Entry]:
        """Return the endpoint's whole policy map."""
        return {
            (direction, key): entry
            for direction in DIRECTIONS
            for key, entry in self.policy(endpoint, direction).entries().items()
        }


def recorded_entries(recorded: Iterable[Json]) -> dict[tuple[Direction, Key], Json]:
    """Return the map entries of a recording by key."""
    return {
        (
            one["direction"],
            Key(
                one["identity"],
                PortKey(PROTOCOL_NUMBERS[one["protocol"]], one["port"], max(one["bpf_prefixlen"] - 48, 0)),
            ),
        ): one
        for one in recorded
    }


def by_identity(entries: Mapping[tuple[Direction, Key], Entry], direction: Direction) -> dict[int, Entries]:
    """Return the entries of one direction in the form of the lookup."""
    found: dict[int, Entries] = {}
    for (way, key), entry in entries.items():
        if way == direction:
            found.setdefault(key.identity, {})[key.ports] = entry
    return found
