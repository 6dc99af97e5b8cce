"""Policy objects to rules.

Source: Kubernetes' NetworkPolicy, Cilium's CiliumNetworkPolicy and CiliumClusterwideNetworkPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from cells.kubernetes.objects.kind import convert
from cells.policy.labels import FQDNSelector, Prefix
from cells.policy.rules import (
    Above,
    ListenerReference,
    PeerRule,
    PolicyError,
    PolicyOptions,
    Ports,
    Rule,
    RuleSource,
    Unenforced,
    UnsupportedError,
    at,
    icmp_type,
    port_ranges,
)
from cells.policy.rules.network_policy import network_policy
from cells.policy.rules.peers import (
    NAMESPACE,
    World,
    cidr_selectors,
    cidr_set,
    entities,
    fqdns,
    label_selector,
    parsed,
    scoped,
)
from cells.policy.rules.sanitise import check_allow, check_deny, check_subject
from cells.policy.rules.schema import (
    Common,
    DefaultDeny,
    EgressRule,
    EndpointSelector,
    IngressRule,
    PortRule,
    RuleLabel,
    RuleSpec,
)
from cells.policy.selectors import ALL, PeerSelector, Selector

__all__ = ["translate"]


CNP = "CiliumNetworkPolicy"
CCNP = "CiliumClusterwideNetworkPolicy"
NETWORK_POLICY = "NetworkPolicy"
POLICY_LABEL = "k8s:io.cilium.k8s.policy"


def translate(object_: Mapping[str, Any], world: World) -> list[Rule]:
    """The rules of one policy object. Raises PolicyError; then none of it may take effect."""
    kind = object_.get("kind")
    if kind == NETWORK_POLICY:
        return [network_policy(object_, world.options)]
    if kind in (CNP, CCNP):
        return _cilium(object_, kind, world)
    raise PolicyError(f"{kind} is not a policy: expected {NETWORK_POLICY}, {CNP} or {CCNP}")


def decode_specs(object_: Mapping[str, Any]) -> list[tuple[str, RuleSpec]]:
    """``spec`` and ``specs`` with their paths, as the schema reads them.

    Raises PolicyError of stage ``schema``.
    """
    given: list[tuple[str, Any]] = []
    if object_.get("spec") is not None:
        given.append(("spec", object_["spec"]))
    given += [(f"specs[{index}]", one) for index, one in enumerate(object_.get("specs") or ())]
    return [(path, _decoded(path, spec)) for path, spec in given]


def _decoded(path: str, spec: Any) -> RuleSpec:
    try:
        return convert(spec, RuleSpec)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        raise PolicyError(reason, path=f"{path}{place.rstrip('`')}", stage="schema") from None


def _cilium(object_: Mapping[str, Any], kind: str, world: World) -> list[Rule]:
    metadata = object_.get("metadata") or {}
    name = metadata.get("name") or ""
    if not name:
        raise PolicyError(f"{kind} must have name")
    namespace = "" if kind == CCNP else metadata.get("namespace") or "default"
    source = RuleSource(kind, namespace, name)
    specs = decode_specs(object_)
    if not specs:
        raise PolicyError("empty policy", prefix=f"Invalid {kind} spec(s): ")
    rules = []
    for path, spec in specs:
        try:
            with at(path):
                check_subject(spec, cluster_wide=kind == CCNP)
                rules.append(_rule(source, metadata.get("uid") or "", spec, path, world))
        except PolicyError as error:
            which = "spec" if path == "spec" else "specs"
            raise PolicyError(
                error.reason, path=error.path, stage=error.stage, prefix=f"Invalid {kind} {which}: "
            ) from None
    return rules


def _rule(source: RuleSource, uid: str, spec: RuleSpec, path: str, world: World) -> Rule:
    subject, is_init = _subject(source, spec)
    build = _Build(source.namespace, is_init, world, set(), set())
    ingress: list[PeerRule] = []
    egress: list[PeerRule] = []
    unenforced: list[Unenforced] = []
    for place, rule in spec.parts():
        entry = _entry(build, f"{path}.{place}", rule, spec, unenforced)
        (ingress if isinstance(rule, IngressRule) else egress).append(entry)
    deny = spec.enable_default_deny if world.options.enable_non_default_deny_policies else None
    if any(one.instead == "leaves nodes open" for one in unenforced):
        # A node that its policy closed by mistake could not be reached to mend it.
        deny = DefaultDeny(ingress=False, egress=False)
        ingress, egress = ([one for one in some if "Deny[" in one.path] for some in (ingress, egress))
    return Rule(
        source=source,
        subject=subject,
        selects_nodes=spec.node_selector is not None,
        ingress=tuple(ingress),
        egress=tuple(egress),
        ingress_default_deny=_denies(deny.ingress if deny else None, ingress),
        egress_default_deny=_denies(deny.egress if deny else None, egress),
        labels=policy_labels(source, uid, spec.labels),
        path=path,
        prefixes=frozenset(build.prefixes),
        groups=frozenset(build.groups),
        uses_services=any(isinstance(rule, EgressRule) and rule.to_services for _, rule in spec.parts()),
        description=spec.description,
        unenforced=tuple(unenforced),
        features=frozenset(spec.features()),
    )


def _entry(
    build: _Build, path: str, rule: IngressRule | EgressRule, spec: RuleSpec, unenforced: list[Unenforced]
) -> PeerRule:
    """A part of a rule; what cannot be enforced is noted, and allows nothing or denies all it could mean.

    Raises PolicyError for an allow rule that Cilium refuses, too.
    """
    place, deny = path.rpartition(".")[2], "Deny[" in path
    try:
        with at(place):
            if deny:
                check_deny(rule, build.options)
            else:
                check_allow(rule, build.options, hosts=spec.node_selector is not None)
        return build.entry(path, rule, deny=deny)
    except PolicyError as error:
        if not deny and not isinstance(error, UnsupportedError):
            raise
        inside = error.path.removeprefix(place).lstrip(".")
        where = f"{path}.{inside}".rstrip(".")
        if deny:
            unenforced.append(Unenforced(where, error.reason, "denies everything that it might select"))
            if inside.startswith(("toPorts", "icmps")):
                return build.denied(path, rule, ports=False)
            return PeerRule(path, (ALL,), None, deny=True)  # one without peers denies nothing
        if spec.node_selector is not None:
            unenforced.append(Unenforced(where, error.reason, "leaves nodes open"))
            return PeerRule(path, (), None)
        if build.binds_others(rule):
            unenforced.append(Unenforced(where, error.reason, "denies everything that it selects"))
            return build.denied(path, rule, ports=True)
        unenforced.append(Unenforced(where, error.reason, "allows nothing"))
        return PeerRule(path, (), None)


def _denies(asked: bool | None, entries: Sequence[PeerRule]) -> bool:
    """Default deny holds in each direction of the rule, unless its ``enableDefaultDeny`` differs."""
    return bool(entries) and (True if asked is None else asked)


def _endpoint_peers(rule: IngressRule | EgressRule) -> int:
    return len((rule.from_endpoints if isinstance(rule, IngressRule) else rule.to_endpoints) or ())


def policy_labels(source: RuleSource, uid: str, extra: Sequence[RuleLabel] = ()) -> tuple[str, ...]:
    """The labels that say where a rule comes from."""
    labels = [f"{POLICY_LABEL}.derived-from={source.kind}", f"{POLICY_LABEL}.name={source.name}"]
    if source.namespace:
        labels.append(f"{POLICY_LABEL}.namespace={source.namespace}")
    labels.append(f"{POLICY_LABEL}.uid={uid}")
    return (*labels, *(f"{one.source}:{one.key}={one.value}" for one in extra))


def _subject(source: RuleSource, spec: RuleSpec) -> tuple[Selector, bool]:
    """The subject of the rule, and whether that is endpoints in ``init``.

    A policy with a namespace selects endpoints there alone, so none in ``init``. The namespace takes the
    place of one in ``matchLabels``; other conditions on namespaces hold beside it.
    """
    if spec.node_selector is not None:
        return label_selector(spec.node_selector), False
    given = cast("EndpointSelector", spec.endpoint_selector)
    if source.namespace:
        labels = {**(given.match_labels or {}), f"k8s:{NAMESPACE}": source.namespace}
        given = msgspec.structs.replace(given, match_labels=labels)
    selector = label_selector(given)
    return selector, selector.has_key("init", "reserved")


class _Build:
    """One rule's entries, and what they refer to."""

    def __init__(
        self, namespace: str, is_init: bool, world: World, prefixes: set[Prefix], groups: set[str]
    ) -> None:
        self._namespace = namespace
        self._is_init = is_init
        self._world = world
        self.prefixes = prefixes
        self.groups = groups

    def entry(self, path: str, rule: IngressRule | EgressRule, *, deny: bool) -> PeerRule:
        """One entry of ingress or egress."""
        with at(path.partition(".")[2]):
            peers, requires = self._peers(rule, deny=deny)
        return PeerRule(
            path=path,
            peers=peers,
            ports=self._ports(rule),
            deny=deny,
            auth=rule.authentication.mode if rule.authentication else None,
            endpoint_peers=_endpoint_peers(rule),
            requires=requires,
        )

    def denied(self, path: str, rule: IngressRule | EgressRule, *, ports: bool) -> PeerRule:
        """Deny the rule's peers its ports, or all ports."""
        peers, requires = self._peers(rule, deny=True)
        plain = tuple(Ports(one.ranges) for one in self._ports(rule) or ()) or None if ports else None
        if not ports and peers is None:
            peers = (ALL,)
        return PeerRule(
            path, peers, plain, deny=True, endpoint_peers=_endpoint_peers(rule), requires=requires
        )

    def binds_others(self, rule: IngressRule | EgressRule) -> bool:
        """Whether what the rule asks for holds where other rules allow the same, too, and is not served."""
        names = any(port.server_names for port in rule.to_ports or ())
        return names or (rule.demands_authentication and not self.options.authenticates)

    @property
    def options(self) -> PolicyOptions:
        """What is served."""
        return self._world.options

    def _peers(
        self, rule: IngressRule | EgressRule, *, deny: bool
    ) -> tuple[tuple[PeerSelector, ...] | None, tuple[Selector, ...]]:
        if isinstance(rule, IngressRule):
            return self._ingress(rule, deny=deny)
        return self._egress(rule, deny=deny)

    def _selectors(
        self, selectors: Sequence[EndpointSelector] | None, *, is_requirement: bool = False
    ) -> tuple[Selector, ...]:
        return tuple(
            scoped(
                label_selector(one),
                self._namespace,
                subject_is_init=self._is_init,
                is_requirement=is_requirement,
            )
            for one in selectors or ()
        )

    def _cidrs(self, prefixes: list[Prefix]) -> list[Selector]:
        self.prefixes.update(prefixes)
        return cidr_selectors(prefixes, self._world.options)

    def _ingress(
        self, rule: IngressRule, *, deny: bool
    ) -> tuple[tuple[PeerSelector, ...] | None, tuple[Selector, ...]]:
        self.groups.update(one.cidr_group_ref for one in rule.from_cidr_set or () if one.cidr_group_ref)
        peers: list[PeerSelector] = [
            *self._selectors(rule.from_endpoints),
            *map(label_selector, rule.from_nodes or ()),
            *entities(rule.from_entities or (), self._world.options),
            *self._cidrs(parsed(rule.from_cidr or ())),
            *self._cidrs(cidr_set(rule.from_cidr_set or (), self._world, deny=deny)),
        ]
        given = (
            rule.from_endpoints,
            rule.from_nodes,
            rule.from_entities,
            rule.from_cidr,
            rule.from_cidr_set,
            rule.from_requires,
        )
        restricted = any(member is not None for member in given)
        requires = self._selectors(rule.from_requires, is_requirement=True)
        return (tuple(peers) if restricted else None), requires

    def _egress(
        self, rule: EgressRule, *, deny: bool
    ) -> tuple[tuple[PeerSelector, ...] | None, tuple[Selector, ...]]:
        self.groups.update(one.cidr_group_ref for one in rule.to_cidr_set or () if one.cidr_group_ref)
        services = self._world.services
        backends = [
            prefix
            for reference in rule.to_services or ()
            for prefix in (services.prefixes(reference) if services is not None else ())
        ]
        peers: list[PeerSelector] = [
            *self._selectors(rule.to_endpoints),
            *map(label_selector, rule.to_nodes or ()),
            *entities(rule.to_entities or (), self._world.options),
            *self._cidrs(parsed(rule.to_cidr or ())),
            *self._cidrs(cidr_set(rule.to_cidr_set or (), self._world, deny=deny)),
            *self._cidrs(backends),
            *fqdns(
                FQDNSelector(one.match_name or "", one.match_pattern or "") for one in rule.to_fqdns or ()
            ),
        ]
        given = (
            rule.to_endpoints,
            rule.to_nodes,
            rule.to_entities,
            rule.to_cidr,
            rule.to_cidr_set,
            rule.to_services,
            rule.to_requires,
            rule.to_fqdns or None,
        )
        restricted = any(member is not None for member in given)
        requires = self._selectors(rule.to_requires, is_requirement=True)
        return (tuple(peers) if restricted else None), requires

    def _ports(self, rule: Common) -> tuple[Ports, ...] | None:
        if rule.icmps:
            fields = [icmp_type(field) for one in rule.icmps for field in one.fields or ()]
            return (Ports(tuple(fields)),)
        if not rule.to_ports:
            return None
        return tuple(
            Ports(tuple(range_ for port in one.ports or () for range_ in port_ranges(port)), self._above(one))
            for one in rule.to_ports
        )

    def _above(self, rule: PortRule) -> Above:
        listener = None
        if rule.listener is not None:
            config = rule.listener.envoy_config
            namespace = "" if config.kind == "CiliumClusterwideEnvoyConfig" else self._namespace
            listener = ListenerReference(
                f"{namespace}/{config.name}/{rule.listener.name}", rule.listener.priority or 0
            )
        return Above(
            rules=rule.rules,
            listener=listener,
            server_names=rule.server_names or (),
            terminating_tls=rule.terminating_tls,
            originating_tls=rule.originating_tls,
        )
