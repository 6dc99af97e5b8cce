"""Translation of a rule's peers to selectors: entities, CIDRs, CIDR groups, services, DNS names."""

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

__all__ = ["CLUSTER", "Services", "TranslationContext", "references_service"]


NAMESPACE = "io.kubernetes.pod.namespace"
NAMESPACE_LABELS = "io.cilium.k8s.namespace.labels"
CLUSTER = "io.cilium.k8s.policy.cluster"
K8S = "k8s"
ANY = "any"

_CLUSTER_RESERVED = ("host", "remote-node", "init", "ingress", "health", "unmanaged", "kube-apiserver")


class Services(Protocol):
    """Looks up backends of services for ``toServices``; only services without a selector have any."""

    def prefixes(self, reference: ServiceReference) -> Iterable[Prefix]:
        """Return the backend addresses of the referenced services, as /32 or /128."""
        ...


class TranslationContext(msgspec.Struct, frozen=True):
    """The inputs of translation besides the object: options, CIDR groups, services."""

    options: PolicyOptions
    groups: Mapping[str, Sequence[Prefix]] = {}
    services: Services | None = None


def references_service(
    reference: ServiceReference, namespace: str, name: str, labels: Mapping[str, str]
) -> bool:
    """Whether ``toServices`` refers to a service, by its name or its labels."""
    by_name, by_labels = reference.k8s_service, reference.k8s_service_selector
    if by_name is not None:
        return by_name.service_name == name and by_name.namespace in ("", namespace)
    if by_labels is None or by_labels.namespace not in ("", namespace):
        return False
    own = LabelSet(Label(K8S, key, value) for key, value in labels.items())
    return label_selector(by_labels.selector).matches(own)


def label_selector(selector: EndpointSelector, *, source: str = "", prefix: str = "") -> Selector:
    """Translate a LabelSelector; ``source`` is the default source, ``prefix`` precedes every key."""
    head = f"{source}:" if source else ""

    def key(text: str) -> str:
        text = f"{prefix}.{text}" if prefix else text
        return text if ":" in text and not prefix else f"{head}{text}"

    return Selector.of(
        [
            *(Requirement.label(key(name), value) for name, value in (selector.match_labels or {}).items()),
            *(
                Requirement.of(key(one.key), one.operator, one.values or ())
                for one in selector.match_expressions or ()
            ),
        ]
    )


def in_namespace(namespace: str) -> Requirement:
    """Return the requirement that selects pods of a namespace."""
    return Requirement.label(f"{K8S}:{NAMESPACE}", namespace)


def scoped(
    selector: Selector, namespace: str, *, subject_is_init: bool, is_requirement: bool = False
) -> Selector:
    """Restrict a peer's selector to the policy's namespace, unless it selects namespaces or reserved labels.

    In a cluster-wide policy it is restricted to endpoints with any namespace, unless the policy's subject is
    ``init``: endpoints there have none. Labels of namespaces do not lift this restriction, because a NotIn of
    one would select nodes and the world. In ``fromRequires`` and ``toRequires`` (``is_requirement``),
    reserved labels do not lift it.
    """
    if selector.has_key(NAMESPACE, K8S, ANY) or (selector.has_source("reserved") and not is_requirement):
        return selector
    if not namespace:
        return (
            selector if subject_is_init else selector.with_requirements(Requirement(K8S, NAMESPACE, EXISTS))
        )
    if selector.has_key_prefix(f"{NAMESPACE_LABELS}."):
        return selector
    return selector.with_requirements(in_namespace(namespace))


def entities(names: Iterable[str], options: PolicyOptions) -> list[Selector]:
    """Return the selectors of entities."""
    selectors: list[Selector] = []
    for name in names:
        if name == "all":
            selectors.append(ALL)
        elif name == "world":
            selectors += [Selector.reserved(world) for world in ("world", "world-ipv4", "world-ipv6")]
        elif name == "cluster":
            selectors += [Selector.reserved(reserved) for reserved in _CLUSTER_RESERVED]
            selectors.append(Selector.of([Requirement.label(f"{K8S}:{CLUSTER}", options.cluster_name)]))
        else:
            selectors.append(Selector.reserved(name))
    return selectors


def cidr_selectors(prefixes: Iterable[Prefix], options: PolicyOptions) -> list[Selector]:
    """Return the selectors of prefixes.

    A prefix of length 0 also selects the world of its family, which has no CIDR label. Whether CIDR rules
    select nodes and pods depends on the identities, not on the selector.
    """
    prefixes = list(prefixes)
    selectors = [Selector((Requirement.label(f"{CIDR}:{cidr_label(prefix)}", ""),)) for prefix in prefixes]
    families = {prefix.version for prefix in prefixes if prefix.prefixlen == 0}
    if options.dual_stack:
        selectors += [Selector.reserved(f"world-ipv{version}") for version in sorted(families)]
    if families and (not options.dual_stack or len(families) > 1):
        selectors.append(Selector.reserved("world"))
    return selectors


def parsed(texts: Iterable[str]) -> list[Prefix]:
    """Parse prefixes that were validated before."""
    return [ip_network(text, strict=False) for text in texts]


def cidr_set(rules: Iterable[CIDRRule], context: TranslationContext, *, deny: bool) -> list[Prefix]:
    """Return the prefixes of a CIDR set without their exceptions, with CIDR groups resolved.

    An unknown group has no prefixes. Raises UnsupportedError if an exception of an allow rule lies outside a
    prefix of its group; a deny rule then denies the whole prefix.
    """
    found: list[Prefix] = []
    for rule in rules:
        exceptions = parsed(rule.excepted)
        if rule.cidr is not None:
            own: Sequence[Prefix] = parsed([rule.cidr])
        else:
            own = context.groups.get(rule.cidr_group_ref or "", ())
            for prefix in own if not deny else ():
                try:
                    check_exceptions(str(prefix), rule.excepted)
                except PolicyError as error:
                    raise UnsupportedError(error.reason) from None
        for prefix in own:
            found += except_prefixes(prefix, exceptions)
    return found


def fqdns(selectors: Iterable[FQDNSelector]) -> list[PeerSelector]:
    """Return the selectors of DNS names, and NONE: until DNS returns addresses, the rule allows no peer."""
    names: list[PeerSelector] = list(selectors)
    return [*names, NONE] if names else []
