"""Translate policy objects to rules.

Source: Kubernetes' NetworkPolicy; Cilium's CiliumNetworkPolicy and CiliumClusterwideNetworkPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from cells.kubernetes.objects.kind import convert
from cells.policy.labels import FQDNSelector, Prefix
from cells.policy.rules import (
    L7Settings,
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
    TranslationContext,
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


def translate(object_: Mapping[str, Any], context: TranslationContext) -> list[Rule]:
    """Return the rules of one policy object. Raises PolicyError; then the object must have no effect."""
    kind = object_.get("kind")
    if kind == NETWORK_POLICY:
        return [network_policy(object_, context.options)]
    if kind in (CNP, CCNP):
        return _cilium(object_, kind, context)
    raise PolicyError(f"{kind} is not a policy: expected {NETWORK_POLICY}, {CNP} or {CCNP}")


def decode_specs(object_: Mapping[str, Any]) -> list[tuple[str, RuleSpec]]:
    """Return ``spec`` and each of ``specs`` with its path, decoded by the schema.

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


def _cilium(object_: Mapping[str, Any], kind: str, context: TranslationContext) -> list[Rule]:
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
                rules.append(_rule(source, metadata.get("uid") or "", spec, path, context))
        except PolicyError as error:
            which = "spec" if path == "spec" else "specs"
            raise PolicyError(
                error.reason, path=error.path, stage=error.stage, prefix=f"Invalid {kind} {which}: "
            ) from None
    return rules


def _rule(source: RuleSource, uid: str, spec: RuleSpec, path: str, context: TranslationContext) -> Rule:
    subject, is_init = _subject(source, spec)
    builder = _RuleBuilder(source.namespace, is_init, context, set(), set())
    ingress: list[PeerRule] = []
    egress: list[PeerRule] = []
    unenforced: list[Unenforced] = []
    for place, rule in spec.parts():
        entry = _entry(builder, f"{path}.{place}", rule, spec, unenforced)
        (ingress if isinstance(rule, IngressRule) else egress).append(entry)
    deny = spec.enable_default_deny if context.options.enable_non_default_deny_policies else None
    if any(one.instead == "leaves nodes open" for one in unenforced):
        # A node closed by mistake would be unreachable, and the policy could not be corrected.
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
        prefixes=frozenset(builder.prefixes),
        groups=frozenset(builder.groups),
        uses_services=any(isinstance(rule, EgressRule) and rule.to_services for _, rule in spec.parts()),
        description=spec.description,
        unenforced=tuple(unenforced),
        features=frozenset(spec.features()),
    )


def _entry(
    builder: _RuleBuilder,
    path: str,
    rule: IngressRule | EgressRule,
    spec: RuleSpec,
    unenforced: list[Unenforced],
) -> PeerRule:
    """Translate one entry of a rule. An entry that cannot be enforced is recorded in ``unenforced``.

    Instead it allows nothing, or denies everything it might select. Raises PolicyError for an allow entry
    that Cilium rejects, too.
    """
    place, deny = path.rpartition(".")[2], "Deny[" in path
    try:
        with at(place):
            if deny:
                check_deny(rule, builder.options)
            else:
                check_allow(rule, builder.options, hosts=spec.node_selector is not None)
        return builder.entry(path, rule, deny=deny)
    except PolicyError as error:
        if not deny and not isinstance(error, UnsupportedError):
            raise
        inside = error.path.removeprefix(place).lstrip(".")
        where = f"{path}.{inside}".rstrip(".")
        if deny:
            unenforced.append(Unenforced(where, error.reason, "denies everything that it might select"))
            if inside.startswith(("toPorts", "icmps")):
                return builder.deny_entry(path, rule, ports=False)
            return PeerRule(path, (ALL,), None, deny=True)  # an entry without peers would deny nothing
        if spec.node_selector is not None:
            unenforced.append(Unenforced(where, error.reason, "leaves nodes open"))
            return PeerRule(path, (), None)
        if builder.restricts_other_rules(rule):
            unenforced.append(Unenforced(where, error.reason, "denies everything that it selects"))
            return builder.deny_entry(path, rule, ports=True)
        unenforced.append(Unenforced(where, error.reason, "allows nothing"))
        return PeerRule(path, (), None)


def _denies(configured: bool | None, entries: Sequence[PeerRule]) -> bool:
    """Whether a direction denies by default: if it has entries, unless ``enableDefaultDeny`` overrides it."""
    return bool(entries) and (configured is None or configured)


def _endpoint_peers(rule: IngressRule | EgressRule) -> int:
    return len((rule.from_endpoints if isinstance(rule, IngressRule) else rule.to_endpoints) or ())


def policy_labels(source: RuleSource, uid: str, extra: Sequence[RuleLabel] = ()) -> tuple[str, ...]:
    """Return the labels that identify the object of a rule."""
    labels = [f"{POLICY_LABEL}.derived-from={source.kind}", f"{POLICY_LABEL}.name={source.name}"]
    if source.namespace:
        labels.append(f"{POLICY_LABEL}.namespace={source.namespace}")
    labels.append(f"{POLICY_LABEL}.uid={uid}")
    return (*labels, *(f"{one.source}:{one.key}={one.value}" for one in extra))


def _subject(source: RuleSource, spec: RuleSpec) -> tuple[Selector, bool]:
    """Return the selector of the rule's subject, and whether it selects endpoints in ``init``.

    A policy with a namespace selects only endpoints there, thus none in ``init``. Its namespace replaces one
    in ``matchLabels``; other requirements on the namespace stay.
    """
    if spec.node_selector is not None:
        return label_selector(spec.node_selector), False
    given = cast("EndpointSelector", spec.endpoint_selector)
    if source.namespace:
        labels = {**(given.match_labels or {}), f"k8s:{NAMESPACE}": source.namespace}
        given = msgspec.structs.replace(given, match_labels=labels)
    selector = label_selector(given)
    return selector, selector.has_key("init", "reserved")


class _RuleBuilder:
    """Builds the entries of one rule, and collects the prefixes and CIDR groups that they refer to."""

    def __init__(
        self,
        namespace: str,
        is_init: bool,
        context: TranslationContext,
        prefixes: set[Prefix],
        groups: set[str],
    ) -> None:
        self._namespace = namespace
        self._is_init = is_init
        self._context = context
        self.prefixes = prefixes
        self.groups = groups

    def entry(self, path: str, rule: IngressRule | EgressRule, *, deny: bool) -> PeerRule:
        """Translate one entry of ingress or egress."""
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

    def deny_entry(self, path: str, rule: IngressRule | EgressRule, *, ports: bool) -> PeerRule:
        """Return an entry that denies the rule's peers its ports, or all ports."""
        peers, requires = self._peers(rule, deny=True)
        plain = tuple(Ports(one.ranges) for one in self._ports(rule) or ()) or None if ports else None
        if not ports and peers is None:
            peers = (ALL,)
        return PeerRule(
            path, peers, plain, deny=True, endpoint_peers=_endpoint_peers(rule), requires=requires
        )

    def restricts_other_rules(self, rule: IngressRule | EgressRule) -> bool:
        """Whether an unsupported part of the rule also restricts traffic that other rules allow."""
        names = any(port.server_names for port in rule.to_ports or ())
        return names or (rule.demands_authentication and not self.options.supports_authentication)

    @property
    def options(self) -> PolicyOptions:
        """The options of the translation."""
        return self._context.options

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
        return cidr_selectors(prefixes, self._context.options)

    def _ingress(
        self, rule: IngressRule, *, deny: bool
    ) -> tuple[tuple[PeerSelector, ...] | None, tuple[Selector, ...]]:
        self.groups.update(one.cidr_group_ref for one in rule.from_cidr_set or () if one.cidr_group_ref)
        peers: list[PeerSelector] = [
            *self._selectors(rule.from_endpoints),
            *map(label_selector, rule.from_nodes or ()),
            *entities(rule.from_entities or (), self._context.options),
            *self._cidrs(parsed(rule.from_cidr or ())),
            *self._cidrs(cidr_set(rule.from_cidr_set or (), self._context, deny=deny)),
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
        services = self._context.services
        backends = [
            prefix
            for reference in rule.to_services or ()
            for prefix in (services.prefixes(reference) if services is not None else ())
        ]
        peers: list[PeerSelector] = [
            *self._selectors(rule.to_endpoints),
            *map(label_selector, rule.to_nodes or ()),
            *entities(rule.to_entities or (), self._context.options),
            *self._cidrs(parsed(rule.to_cidr or ())),
            *self._cidrs(cidr_set(rule.to_cidr_set or (), self._context, deny=deny)),
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
            Ports(
                tuple(range_ for port in one.ports or () for range_ in port_ranges(port)),
                self._l7_settings(one),
            )
            for one in rule.to_ports
        )

    def _l7_settings(self, rule: PortRule) -> L7Settings:
        listener = None
        if rule.listener is not None:
            config = rule.listener.envoy_config
            namespace = "" if config.kind == "CiliumClusterwideEnvoyConfig" else self._namespace
            listener = ListenerReference(
                f"{namespace}/{config.name}/{rule.listener.name}", rule.listener.priority or 0
            )
        return L7Settings(
            rules=rule.rules,
            listener=listener,
            server_names=rule.server_names or (),
            terminating_tls=rule.terminating_tls,
            originating_tls=rule.originating_tls,
        )
