"""Read access to policies in force, for the API, ``hive policy`` and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from cells.base.addresses import IPAddress
from cells.base.labels import Label, parse
from cells.base.metrics import Histogram, MetricFamily, counter, gauge, histogram, ingested
from cells.cluster.identity.numbers import is_endpoint
from cells.kubernetes.objects.kind import convert
from cells.policy.compute import SelectorPolicy
from cells.policy.compute.endpoint_policy import DirectionPolicy, Filter
from cells.policy.compute.map_state import Match, lookup
from cells.policy.compute.policies import NamedPodPort
from cells.policy.control.computer import RulePolicy
from cells.policy.control.names import PodNetworks
from cells.policy.explain.trial import KnownEnds, Trial, with_objects
from cells.policy.labels import FQDNSelector
from cells.policy.rules import PROTOCOLS, Direction, Rule, RuleSource
from cells.policy.rules.network_policy import (
    Egress,
    NetworkPolicyIngress,
    NetworkPolicySpec,
    Peer,
    peer_selector,
)
from cells.policy.rules.peers import CLUSTER, label_selector, scoped
from cells.policy.rules.schema import EgressRule, EndpointSelector, IngressRule
from cells.policy.rules.translate import CCNP, CNP, NETWORK_POLICY, decode_specs
from cells.policy.selectors import PeerSelector, Selector, selector_text

# Policy objects, rules and selectors as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_policy, cilium_policy_change_total, cilium_policy_implementation_delay,
#         cilium_policy_selector_match_count_max.

SOURCES: Final = {"NetworkPolicy": "k8s"}
"""Values of Cilium's label ``source`` by kind; other kinds are custom resources."""
CLASSES: Final = ("fqdn", "cluster", "world", "other")
OBJECTS: Final = {CNP: "cilium_network_policies", CCNP: "cilium_clusterwide_network_policies"}
"""Counted kinds of objects, and their names in metrics."""
RULES: Final = (
    *("deny_policies", "dns_policies", "fqdn_policies", "host_network_policies", "http_policies"),
    *("http_header_matches_policies", "ingress_cidr_group_policies", "l3_policies", "mutual_auth_policies"),
    *("non_defaultdeny_policies", "other_l7_policies", "sni_allow_list_policies", "tls_inspection_policies"),
)
"""Features of rules, by their names in metrics."""


class PolicyCounts:
    """Counters of changes of policy objects."""

    def __init__(self) -> None:
        self.outcomes = Counter({"success": 0, "fail": 0, "failure": 0})
        """Cilium declares ``failure`` and counts under ``fail``, so both exist."""
        self.delays = {source: Histogram() for source in ("k8s", "custom-resource", "api")}

        self.ingested: Counter[tuple[str, str]] = Counter()
        """Number of received versions of objects, including rejected ones, and of deleted objects."""

    def ingest(self, kind: str, action: Literal["add", "delete"]) -> None:
        """Count an object that was received or deleted."""
        if name := OBJECTS.get(kind):
            self.ingested[name, action] += 1

    def changed(self, *, valid: bool) -> None:
        """Count an object that was applied or deleted (valid), or rejected."""
        self.outcomes["success" if valid else "fail"] += 1

    def realized(self, kind: str, seconds: float) -> None:
        """Observe the time from a change of an object to the last write of a map, in seconds."""
        self.delays[SOURCES.get(kind, "custom-resource")].observe(seconds)


def families(policy: RulePolicy, counts: PolicyCounts) -> Iterator[MetricFamily]:
    """Number of rules, outcomes of changes, and the largest selectors."""
    yield gauge(
        "cilium_policy", "Number of policies currently loaded", sum(1 for _ in policy.repository.rules)
    )
    yield counter(
        "cilium_policy_change_total", "Number of policy changes by outcome", counts.outcomes, "outcome"
    )
    yield histogram(
        "cilium_policy_implementation_delay",
        "Time between a policy change and it being fully deployed into the datapath",
        counts.delays,
        "source",
    )
    rules, known = policy.repository.rules, policy.repository.context.groups.keys()
    yield gauge(
        "cilium_cidrgroups_referenced",
        "Number of CNPs and CCNPs referencing at least one CiliumCIDRGroup. CNPs with empty or non-existing"
        " CIDRGroupRefs are not considered",
        len({rule.source for rule in rules if rule.groups & known}),
    )
    yield from (ingested(name, counts.ingested) for name in OBJECTS.values())
    yield from (ingested(name, policy.repository.ingested) for name in RULES)
    cache = policy.selector_cache
    most = dict.fromkeys(CLASSES, 0)
    for selector in cache.selectors:
        kind = _selector_class(selector)
        most[kind] = max(most[kind], len(cache.selections(selector)))
    yield gauge(
        "cilium_policy_selector_match_count_max",
        "The maximum number of identities selected by a network policy peer selector",
        most,
        "class",
        fixed=True,
    )


def _selector_class(selector: PeerSelector) -> str:
    if isinstance(selector, FQDNSelector):
        return "fqdn"
    if selector.has_key(CLUSTER, "k8s"):
        return "cluster"
    world_keys = {"world", "world-ipv4", "world-ipv6"}
    reserved = any(one.source == "reserved" and one.key in world_keys for one in selector.requirements)
    return "world" if reserved else "other"


ANY_SOURCES = frozenset({"any", "unspec"})
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}


class SelectorUse(msgspec.Struct, frozen=True):
    """A selector, its identities, the number of its users, and the labels of one rule that has it."""

    selector: str
    identities: tuple[int, ...]
    users: int
    labels: tuple[Label, ...]


class PortUse(msgspec.Struct, frozen=True):
    """The rules of an endpoint for one port: by selector, with the labels of their origins."""

    port: int
    end: int
    """The last port of a range, else 0."""
    port_name: str
    protocol: str
    l7_rules: Mapping[str, dict[str, Any] | None]
    """Deny, authentication and L7 rules in Cilium's JSON, sorted by selector; None for a mere allow."""
    origins: Mapping[str, tuple[tuple[str, ...], ...]]


class PolicyView:
    """Read access to the rules in force; synchronous, so that each call sees one revision."""

    def __init__(self, policy: RulePolicy, networks: PodNetworks | None) -> None:
        self._policy = policy
        self._networks = networks

    @property
    def revision(self) -> int:
        """Revision of the rules in force."""
        return self._policy.revision

    def rules(self, labels: Collection[str] = ()) -> list[dict[str, Any]]:
        """The rules in force that have all of these labels, in Cilium's JSON form."""
        wanted = [parse(text) for text in labels]
        repository = self._policy.repository
        found = []
        for source in repository.sources():
            rules = repository.rules_of(source)
            objects = rule_objects(repository.object_of(source), rules)
            found += [
                object_
                for rule, object_ in zip(rules, objects, strict=True)
                if _has(map(parse, rule.labels), wanted)
            ]
        return found

    def labels_of(self, kind: str, namespace: str, name: str) -> list[tuple[str, ...]]:
        """The labels of each rule of an object."""
        repository = self._policy.repository
        return [tuple(rule.labels) for rule in repository.rules_of(RuleSource(kind, namespace, name))]

    def selectors(self) -> list[SelectorUse]:
        """The selectors in use by policies of this node's endpoints, sorted by text."""
        cache, policies = self._policy.selector_cache, self._policy.computed
        named: dict[PeerSelector, tuple[str, ...]] = {}
        for filter_ in policies.filters():
            for selector, selector_policy in filter_.selectors.items():
                if selector_policy.origins:
                    named.setdefault(selector, selector_policy.origins[0].labels)
        found = [
            SelectorUse(
                selector=selector_text(selector),
                identities=tuple(sorted(cache.selections(selector))),
                users=cache.users(selector),
                labels=tuple(map(parse, named.get(selector, ()))),
            )
            for selector in cache.selectors
        ]
        return sorted(found, key=lambda one: one.selector)

    def ports(self, endpoint_id: int, direction: Direction) -> list[PortUse]:
        """The rules of an endpoint for a direction, by port; empty if the direction is not enforced."""
        policy = self._policy.computed.direction(endpoint_id, direction)
        if policy is None or not policy.enforced:
            return []
        return [_port_use(filter_) for filter_ in policy.filters]

    def policy(self, endpoint_id: int, direction: Direction) -> DirectionPolicy | None:
        """The policy of an endpoint for a direction, read only; None without a policy."""
        return self._policy.computed.direction(endpoint_id, direction)

    @property
    def no_http_proxy(self) -> str:
        """Why connections that HTTP rules select are dropped; empty while the proxy runs."""
        proxy = self._policy.http_proxy
        return "" if proxy.runs else proxy.message

    def trial(
        self,
        objects: Iterable[Mapping[str, Any]],
        node: str,
        names: Callable[[IPAddress], Iterable[str]],
    ) -> Trial:
        """Return a trial of the rules in force with these objects added or replaced.

        ``names`` returns the DNS names of an address. Raises UnanswerableError if an object is rejected.
        """
        policy = self._policy
        repository = policy.repository.copy()
        known = KnownEnds(
            node=node,
            identities=dict(policy.selector_cache.identities),
            named_ports=self._named_ports,
            cluster_ports=policy.computed.cluster_ports,
            names=names,
            proxies=policy.redirect,
            no_http_proxy=self.no_http_proxy,
        )
        return Trial(repository, with_objects(repository, objects), known)

    def _named_ports(self, endpoint_id: int, identity: int) -> frozenset[NamedPodPort] | None:
        key = self._policy.computed.key(endpoint_id)
        return key.named_ports if key is not None and key.identity == identity else None

    def has_policy(self, endpoint_id: int) -> bool:
        """Whether the endpoint has a computed policy."""
        return self._policy.computed.key(endpoint_id) is not None

    def decide(
        self,
        endpoint_id: int,
        direction: Direction,
        peer: int,
        protocol: int,
        port: int,
        *,
        address: IPAddress | None,
    ) -> Match:
        """Return the verdict on a packet, with the entry and its origins; for ICMP, the port is the type.

        ``drop`` for an endpoint without a policy. The peer's address, if any, matters only if prefixes also
        select pods. Raises OSError, NotStartedError.
        """
        network = None
        if address is not None and self._networks is not None and is_endpoint(peer):
            network = self._networks.around(address)
        entries = self._policy.computed.by_identity(endpoint_id, direction)
        match = lookup(entries, peer, protocol, port, network.id if network is not None else 0)
        return match._replace(verdict="drop") if match.has_http_filter and self.no_http_proxy else match


def _port_use(filter_: Filter) -> PortUse:
    texts = {selector_text(selector): policy for selector, policy in filter_.selectors.items()}
    policies = sorted(texts.items(), key=lambda one: one[0])
    return PortUse(
        port=filter_.port.port,
        end=filter_.port.end,
        port_name=filter_.port.name,
        protocol=_PROTOCOL_NAMES[filter_.port.protocol],
        l7_rules={text: _l7_rules_json(policy) for text, policy in policies},
        origins={
            text: tuple(sorted({origin.labels for origin in policy.origins}))
            for text, policy in policies
            if policy.origins
        },
    )


def _l7_rules_json(selector_policy: SelectorPolicy) -> dict[str, Any] | None:
    """Deny, authentication and L7 rules of a selector; None if it is merely allowed."""
    rule: dict[str, Any] = {}
    if selector_policy.rules is not None:
        rule |= msgspec.to_builtins(selector_policy.rules)
    if selector_policy.auth is not None:
        rule["auth"] = {"mode": selector_policy.auth}
    if selector_policy.deny:
        rule["IsDeny"] = True
    return rule or None


def _has(labels: Iterator[Label], wanted: Collection[Label]) -> bool:
    """Whether all wanted labels are present; one without a source matches any source."""
    present = list(labels)
    return all(
        any(
            one.key == label.key
            and one.value == label.value
            and (one.source == label.source or one.source in ANY_SOURCES)
            for label in present
        )
        for one in wanted
    )


# A policy object as Cilium's rules in JSON, the form of ``GET /policy``.
#
# Source: Cilium 1.17, pkg/policy/api/rule.go: an object's specs with namespaces, sources of labels and
#         ``enableDefaultDeny`` filled in; a NetworkPolicy as the rule it is translated to.


_SELECTORS = {
    "fromEndpoints": "from_endpoints",
    "fromRequires": "from_requires",
    "toEndpoints": "to_endpoints",
    "toRequires": "to_requires",
}


def rule_objects(object_: Mapping[str, Any], rules: Sequence[Rule]) -> Iterator[dict[str, Any]]:
    """Each rule of an object in Cilium's JSON form; ``rules`` is its translation."""
    if object_.get("kind") == NETWORK_POLICY:
        spec = convert(object_.get("spec") or {}, NetworkPolicySpec)
        for rule in rules:
            yield _rule_json(rule, _network_policy(spec, rule))
        return
    for (_, rule_spec), rule in zip(decode_specs(object_), rules, strict=True):
        parts: dict[str, list[dict[str, Any]]] = {}
        for path, part in rule_spec.parts():
            parts.setdefault(path.partition("[")[0], []).append(_part(part, rule))
        yield _rule_json(rule, parts)


def _rule_json(rule: Rule, parts: Mapping[str, Any]) -> dict[str, Any]:
    selects = "nodeSelector" if rule.selects_nodes else "endpointSelector"
    return {
        selects: _selector(rule.subject),
        **parts,
        "labels": [
            {"key": label.key, "value": label.value, "source": label.source}
            for label in map(parse, rule.labels)
        ],
        "enableDefaultDeny": {"ingress": rule.ingress_default_deny, "egress": rule.egress_default_deny},
        **({"description": rule.description} if rule.description else {}),
    }


def _selector(selector: Selector) -> object:
    return {} if selector.is_wildcard else selector.as_object()


def _part(part: IngressRule | EgressRule, rule: Rule) -> dict[str, Any]:
    """Return an entry of the spec with the peers' selectors as translated."""
    shown: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(part))
    is_init = rule.subject.has_key("init", "reserved")
    for name, attribute in _SELECTORS.items():
        selectors: Sequence[EndpointSelector] | None = getattr(part, attribute, None)
        if selectors is not None:
            shown[name] = [
                _selector(
                    scoped(
                        label_selector(one),
                        rule.source.namespace,
                        subject_is_init=is_init,
                        is_requirement=name.endswith("Requires"),
                    )
                )
                for one in selectors
            ]
    for ports in shown.get("toPorts") or ():
        for port in ports.get("ports") or ():
            port.setdefault("protocol", "ANY")
    return shown


def _network_policy(spec: NetworkPolicySpec, rule: Rule) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if rule.ingress:
        parts["ingress"] = [entry for one in spec.ingress or () for entry in _entries(one, rule)] or [{}]
    if rule.egress:
        parts["egress"] = [entry for one in spec.egress or () for entry in _entries(one, rule)] or [{}]
    return parts


def _entries(entry: NetworkPolicyIngress | Egress, rule: Rule) -> Iterator[dict[str, Any]]:
    """Yield one entry per peer, because peers are alternatives."""
    prefix, peers = ("from", entry.sources) if isinstance(entry, NetworkPolicyIngress) else ("to", entry.to)
    ports: dict[str, Any] = {}
    if entry.ports:
        ports["toPorts"] = [
            {
                "ports": [
                    {"port": str(one.port or 0), "protocol": one.protocol}
                    | ({"endPort": one.end_port} if one.end_port else {})
                ]
            }
            for one in entry.ports
        ]
    if not peers:
        yield {f"{prefix}Endpoints": [{}]} | ports
    for peer in peers or ():
        yield _peer(peer, prefix, rule.source.namespace) | ports


def _peer(peer: Peer, prefix: str, namespace: str) -> dict[str, Any]:
    if peer.ip_block is not None:
        block: dict[str, Any] = {"cidr": peer.ip_block.cidr}
        if peer.ip_block.excepted:
            block["except"] = list(peer.ip_block.excepted)
        return {f"{prefix}CIDRSet": [block]}
    selector = peer_selector(peer, namespace)
    return {f"{prefix}Endpoints": [_selector(selector)] if selector is not None else []}
