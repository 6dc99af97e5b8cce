"""Who a rule's peers are, as selectors: entities, CIDRs, groups, services, DNS names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_network
from typing import Protocol

import msgspec

from cells.base.labels import CIDR, Label, cidr_label
from cells.policy.labels import FQDNSelector, LabelSet, Prefix, except_prefixes
from cells.policy.rules import PolicyError, PolicyOptions, UnsupportedError
from cells.policy.rules.sanitise import check_exceptions
from cells.policy.rules.schema import CIDRRule, EndpointSelector, ServiceReference
from cells.policy.selectors import ALL, EXISTS, NONE, PeerSelector, Requirement, Selector

__all__ = ["CLUSTER", "Services", "World", "means_service"]


NAMESPACE = "io.kubernetes.pod.namespace"
NAMESPACE_LABELS = "io.cilium.k8s.namespace.labels"
CLUSTER = "io.cilium.k8s.policy.cluster"
K8S = "k8s"
ANY = "any"

_CLUSTER_RESERVED = ("host", "remote-node", "init", "ingress", "health", "unmanaged", "kube-apiserver")


class Services(Protocol):
    """What rules ask about services; only those without a selector of their own count."""

    def prefixes(self, reference: ServiceReference) -> Iterable[Prefix]:
        """The backends' addresses of the services meant, as /32 or /128."""
        ...


class World(msgspec.Struct, frozen=True):
    """What a translation depends on beside the object: options, CIDR groups, services."""

    options: PolicyOptions
    groups: Mapping[str, Sequence[Prefix]] = {}
    services: Services | None = None


def means_service(reference: ServiceReference, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
    """Whether ``toServices`` means a service, by its name or by its labels."""
    by_name, by_labels = reference.k8s_service, reference.k8s_service_selector
    if by_name is not None:
        return by_name.service_name == name and by_name.namespace in ("", namespace)
    if by_labels is None or by_labels.namespace not in ("", namespace):
        return False
    own = LabelSet(Label(K8S, key, value) for key, value in labels.items())
    return label_selector(by_labels.selector).matches(own)


def label_selector(selector: EndpointSelector, *, source: str = "", prefix: str = "") -> Selector:
    """A selector from an object; ``source`` goes before keys without one, ``prefix`` before every key."""
    head = f"{source}:" if source else ""

    def key(text: str) -> str:
        text = f"{prefix}.{text}" if prefix else text
        return text if ":" in text and not prefix else f"{head}{text}"

    return Selector.of(
        [
            *(
                Requirement.of(key(name), "In", (value,))
                for name, value in (selector.match_labels or {}).items()
            ),
            *(
                Requirement.of(key(one.key), one.operator, one.values or ())
                for one in selector.match_expressions or ()
            ),
        ]
    )


def in_namespace(namespace: str) -> Requirement:
    """The pods of a namespace."""
    return Requirement(K8S, NAMESPACE, "In", (namespace,))


def scoped(
    selector: Selector, namespace: str, *, subject_is_init: bool, is_requirement: bool = False
) -> Selector:
    """A peer's selector limited to the policy's namespace, unless it names namespaces or reserved labels.

    Without a namespace (a cluster-wide policy) it is limited to what has one, unless the policy is for
    endpoints in ``init``, which have none. Labels of namespaces do not lift that: a NotIn of one would
    select nodes and the world. Reserved labels lift no limit of ``fromRequires`` and ``toRequires``
    (``is_requirement``).
    """
    if selector.has_key(NAMESPACE, K8S, ANY) or (selector.has_source("reserved") and not is_requirement):
        return selector
    if not namespace:
        return selector if subject_is_init else selector.also(Requirement(K8S, NAMESPACE, EXISTS))
    if selector.has_key_prefix(f"{NAMESPACE_LABELS}."):
        return selector
    return selector.also(in_namespace(namespace))


def entities(names: Iterable[str], options: PolicyOptions) -> list[Selector]:
    """The selectors of entities."""
    selectors: list[Selector] = []
    for name in names:
        if name == "all":
            selectors.append(ALL)
        elif name == "world":
            selectors += [Selector.reserved(world) for world in ("world", "world-ipv4", "world-ipv6")]
        elif name == "cluster":
            selectors += [Selector.reserved(reserved) for reserved in _CLUSTER_RESERVED]
            selectors.append(Selector.of([Requirement(K8S, CLUSTER, "In", (options.cluster_name,))]))
        else:
            selectors.append(Selector.reserved(name))
    return selectors


def cidr_selectors(prefixes: Iterable[Prefix], options: PolicyOptions) -> list[Selector]:
    """Selectors of prefixes: of what lies inside, and of nodes only where the options say so.

    The whole of a family is its world, too, which has no cidr label.
    """
    prefixes = list(prefixes)
    selectors = [Selector((Requirement(CIDR, cidr_label(prefix), "In", ("",)),)) for prefix in prefixes]
    families = {prefix.version for prefix in prefixes if prefix.prefixlen == 0}
    if options.dual_stack:
        selectors += [Selector.reserved(f"world-ipv{version}") for version in sorted(families)]
    if families and (not options.dual_stack or len(families) > 1):
        selectors.append(Selector.reserved("world"))
    return selectors


def parsed(texts: Iterable[str]) -> list[Prefix]:
    """Prefixes from texts that were checked before."""
    return [ip_network(text, strict=False) for text in texts]


def cidr_set(rules: Iterable[CIDRRule], world: World, *, deny: bool) -> list[Prefix]:
    """What a CIDR set means: prefixes without their exceptions, groups filled in.

    A group that does not exist has no prefixes. Raises UnsupportedError where an exception of an allow rule
    lies outside a prefix of its group: a deny rule denies the prefix nevertheless.
    """
    found: list[Prefix] = []
    for rule in rules:
        exceptions = parsed(rule.excepted)
        if rule.cidr is not None:
            own: Sequence[Prefix] = parsed([rule.cidr])
        else:
            own = world.groups.get(rule.cidr_group_ref or "", ())
            for prefix in own if not deny else ():
                try:
                    check_exceptions(str(prefix), rule.excepted)
                except PolicyError as error:
                    raise UnsupportedError(error.reason) from None
        for prefix in own:
            found += except_prefixes(prefix, exceptions)
    return found


def fqdns(selectors: Iterable[FQDNSelector]) -> list[PeerSelector]:
    """DNS names; the rule selects no endpoint until DNS has answered."""
    names: list[PeerSelector] = list(selectors)
    return [*names, NONE] if names else []
