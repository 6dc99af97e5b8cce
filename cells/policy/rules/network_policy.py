"""Translate Kubernetes' NetworkPolicy to a rule.

``policyTypes`` decides the directions of the policy, as in Kubernetes: rules of other directions are ignored.

Source: networking.k8s.io/v1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from cells.kubernetes.objects.kind import convert
from cells.policy.labels import Prefix, except_prefixes, parse_prefix
from cells.policy.rules import (
    PeerRule,
    PolicyError,
    PolicyOptions,
    Ports,
    Rule,
    RuleSource,
    at,
    is_service_name,
    port_number,
    port_ranges,
)
from cells.policy.rules.peers import K8S, NAMESPACE, NAMESPACE_LABELS, cidr_selectors, in_namespace
from cells.policy.rules.sanitise import check_exceptions, check_values
from cells.policy.rules.schema import PolicyPart, PortProtocol
from cells.policy.selectors import ALL, PeerSelector, Requirement, Selector

# The ``spec`` of a NetworkPolicy as types.


class NetworkPolicyExpression(PolicyPart, frozen=True, gc=False):
    """One entry of ``matchExpressions``; an unknown operator is rejected later, with the policy."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None


class NetworkPolicySelector(PolicyPart, frozen=True, gc=False):
    """A LabelSelector."""

    match_labels: Mapping[str, str] | None = None
    match_expressions: tuple[NetworkPolicyExpression, ...] | None = None


class IPBlock(PolicyPart, frozen=True, gc=False, rename={"excepted": "except"}):
    """A prefix with exceptions."""

    cidr: str
    excepted: tuple[str, ...] | None = None


class Peer(PolicyPart, frozen=True, gc=False):
    """Pods, namespaces, or a prefix."""

    pod_selector: NetworkPolicySelector | None = None
    namespace_selector: NetworkPolicySelector | None = None
    ip_block: IPBlock | None = None


class NetworkPolicyPort(PolicyPart, frozen=True, gc=False):
    """A port by number or name; without one, every port of the protocol."""

    port: int | str | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    end_port: int | None = None


class NetworkPolicyIngress(PolicyPart, frozen=True, gc=False, rename={"sources": "from"}):
    """Sources that may reach the pods, and the ports."""

    sources: tuple[Peer, ...] | None = None
    ports: tuple[NetworkPolicyPort, ...] | None = None


class Egress(PolicyPart, frozen=True, gc=False):
    """Destinations that the pods may reach, and the ports."""

    to: tuple[Peer, ...] | None = None
    ports: tuple[NetworkPolicyPort, ...] | None = None


class NetworkPolicySpec(PolicyPart, frozen=True, gc=False):
    """The selected pods, and the traffic that they are still allowed."""

    pod_selector: NetworkPolicySelector = NetworkPolicySelector()
    ingress: tuple[NetworkPolicyIngress, ...] | None = None
    egress: tuple[Egress, ...] | None = None
    policy_types: tuple[Literal["Ingress", "Egress"], ...] | None = None


NAME_ANNOTATIONS = ("policy.cilium.io/name", "io.cilium.name")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


def network_policy(object_: Mapping[str, Any], options: PolicyOptions) -> Rule:
    """Translate a NetworkPolicy. Raises PolicyError."""
    from cells.policy.rules.translate import policy_labels

    metadata = object_.get("metadata") or {}
    namespace = metadata.get("namespace") or "default"
    try:
        spec = convert(object_.get("spec") or {}, NetworkPolicySpec)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        raise PolicyError(reason, path=f"spec{place.rstrip('`')}", stage="schema") from None
    annotations = metadata.get("annotations") or {}
    label = next(
        (annotations[key] for key in NAME_ANNOTATIONS if annotations.get(key)), metadata.get("name") or ""
    )
    source = RuleSource("NetworkPolicy", namespace, metadata.get("name") or "")
    prefixes: set[Prefix] = set()
    with at("spec"):
        ingress, egress = _directions(spec, namespace, options, prefixes)
        subject = _selector(spec.pod_selector).with_requirements(in_namespace(namespace))
    return Rule(
        source=source,
        subject=subject,
        selects_nodes=False,
        ingress=ingress,
        egress=egress,
        ingress_default_deny=bool(ingress),
        egress_default_deny=bool(egress),
        labels=policy_labels(source._replace(name=label), metadata.get("uid") or ""),
        path="spec",
        prefixes=frozenset(prefixes),
        features=frozenset({"l3_policies"} if any(one.peers for one in (*ingress, *egress)) else ()),
    )


def _directions(
    spec: NetworkPolicySpec, namespace: str, options: PolicyOptions, prefixes: set[Prefix]
) -> tuple[tuple[PeerRule, ...], tuple[PeerRule, ...]]:
    types = spec.policy_types or (("Ingress", "Egress") if spec.egress else ("Ingress",))
    ingress: list[PeerRule] = []
    egress: list[PeerRule] = []
    for index, rule in enumerate(spec.ingress or ()):
        with at(f"ingress[{index}]"):
            ingress += _entries(f"spec.ingress[{index}]", rule.sources, rule, namespace, options, prefixes)
    for index, outgoing in enumerate(spec.egress or ()):
        with at(f"egress[{index}]"):
            egress += _entries(f"spec.egress[{index}]", outgoing.to, outgoing, namespace, options, prefixes)
    no_peer = PeerRule(path="spec.policyTypes", peers=(), ports=None)
    return (
        tuple(ingress or [no_peer]) if "Ingress" in types else (),
        tuple(egress or [no_peer]) if "Egress" in types else (),
    )


def _entries(
    path: str,
    peers: Sequence[Peer] | None,
    rule: NetworkPolicyIngress | Egress,
    namespace: str,
    options: PolicyOptions,
    prefixes: set[Prefix],
) -> list[PeerRule]:
    ports = tuple(_ports(port, index) for index, port in enumerate(rule.ports)) if rule.ports else None
    if not peers:
        return [PeerRule(path=path, peers=(ALL,), ports=ports)]
    name = "from" if isinstance(rule, NetworkPolicyIngress) else "to"
    entries = []
    for index, peer in enumerate(peers):
        with at(f"{name}[{index}]"):
            selectors = _peer(peer, namespace, options, prefixes, name.capitalize())
        entries.append(PeerRule(path=f"{path}.{name}[{index}]", peers=selectors, ports=ports))
    return entries


def _peer(
    peer: Peer, namespace: str, options: PolicyOptions, prefixes: set[Prefix], member: str
) -> tuple[PeerSelector, ...]:
    if peer.ip_block is not None:
        if peer.pod_selector is not None or peer.namespace_selector is not None:
            raise PolicyError(f"Combining {member}Endpoints and {member}CIDRSet is not supported yet")
        return tuple(
            cidr_selectors(_block(peer.ip_block.cidr, peer.ip_block.excepted or (), prefixes), options)
        )
    selector = peer_selector(peer, namespace)
    return (selector,) if selector is not None else ()


def peer_selector(peer: Peer, namespace: str) -> Selector | None:
    """Return the selector of pods that a peer of a policy in ``namespace`` selects; None without members.

    Raises PolicyError.
    """
    if peer.namespace_selector is not None:
        namespaces = _selector(peer.namespace_selector, prefix=NAMESPACE_LABELS)
        if namespaces.is_wildcard:
            namespaces = Selector((Requirement(K8S, NAMESPACE, "Exists"),))
        pods = _selector(peer.pod_selector) if peer.pod_selector is not None else ALL
        return namespaces.with_requirements(*pods.requirements)
    if peer.pod_selector is not None:
        return _selector(peer.pod_selector).with_requirements(in_namespace(namespace))
    return None


def _block(cidr: str, exceptions: Sequence[str], prefixes: set[Prefix]) -> list[Prefix]:
    try:
        prefix = parse_prefix(cidr)
    except ValueError as error:
        raise PolicyError(f'Unable to parse CIDRRule "{cidr}": {error}') from None
    try:
        excepted = [parse_prefix(text) for text in exceptions]
    except ValueError as error:
        raise PolicyError(str(error)) from None
    check_exceptions(cidr, exceptions)
    own = except_prefixes(prefix, excepted)
    prefixes.update(own)
    return own


def _selector(selector: NetworkPolicySelector, *, prefix: str = "") -> Selector:
    head = f"{K8S}:{prefix}." if prefix else f"{K8S}:"
    requirements = [
        Requirement.label(f"{head}{key}", value) for key, value in (selector.match_labels or {}).items()
    ]
    for index, one in enumerate(selector.match_expressions or ()):
        if one.operator not in _OPERATORS:
            raise PolicyError(
                f"invalid label selector: matchExpressions[{index}].operator: Invalid value: "
                f'"{one.operator}": not a valid selector operator'
            )
        check_values(index, one.operator, one.values)
        requirements.append(Requirement.of(f"{head}{one.key}", one.operator, one.values or ()))
    return Selector.of(requirements)


def _ports(port: NetworkPolicyPort, index: int) -> Ports:
    with at(f"ports[{index}]"):
        text = "0" if port.port is None else str(port.port)
        if not is_service_name(text):
            port_number(text)
        return Ports(tuple(port_ranges(PortProtocol(text, port.protocol, port.end_port or 0))))
