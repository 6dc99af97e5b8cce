"""A policy object as Cilium's rules in JSON, the form of ``GET /policy``.

Source: Cilium 1.17, pkg/policy/api/rule.go: an object's specs with namespaces, sources of labels and
``enableDefaultDeny`` filled in; a NetworkPolicy as the rule it is translated to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cells.base.labels import parse
from cells.kubernetes.objects.nulls import convert
from cells.policy.rules import Rule
from cells.policy.rules.network_policy import (
    Egress,
    NetworkPolicyIngress,
    NetworkPolicySpec,
    Peer,
    peer_selector,
)
from cells.policy.rules.peers import label_selector, scoped
from cells.policy.rules.schema import EgressRule, EndpointSelector, IngressRule
from cells.policy.rules.translate import NETWORK_POLICY, decode_specs
from cells.policy.selectors import Selector

__all__ = ["rule_objects"]


_SELECTORS = {
    "fromEndpoints": "from_endpoints",
    "fromRequires": "from_requires",
    "toEndpoints": "to_endpoints",
    "toRequires": "to_requires",
}


def rule_objects(object_: Mapping[str, Any], rules: Sequence[Rule]) -> Iterator[dict[str, Any]]:
    """Each of the object's rules; ``rules`` is what it was translated to."""
    if object_.get("kind") == NETWORK_POLICY:
        spec = convert(object_.get("spec") or {}, NetworkPolicySpec)
        for rule in rules:
            yield _whole(rule, _network_policy(spec, rule))
        return
    for (_, written), rule in zip(decode_specs(object_), rules, strict=True):
        parts: dict[str, list[dict[str, Any]]] = {}
        for path, part in written.parts():
            parts.setdefault(path.partition("[")[0], []).append(_part(part, rule))
        yield _whole(rule, parts)


def _whole(rule: Rule, parts: Mapping[str, Any]) -> dict[str, Any]:
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
    """An entry as it is written, with the peers it means."""
    shown: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(part))
    is_init = rule.subject.has_key("init", "reserved")
    for name, attribute in _SELECTORS.items():
        selectors: Sequence[EndpointSelector] | None = getattr(part, attribute, None)
        if selectors is not None:
            shown[name] = [
                _selector(scoped(label_selector(one), rule.source.namespace, subject_is_init=is_init))
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
    """One entry for each peer: they are alternatives."""
    way, peers = ("from", entry.sources) if isinstance(entry, NetworkPolicyIngress) else ("to", entry.to)
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
        yield {f"{way}Endpoints": [{}]} | ports
    for peer in peers or ():
        yield _peer(peer, way, rule.source.namespace) | ports


def _peer(peer: Peer, way: str, namespace: str) -> dict[str, Any]:
    if peer.ip_block is not None:
        block: dict[str, Any] = {"cidr": peer.ip_block.cidr}
        if peer.ip_block.excepted:
            block["except"] = list(peer.ip_block.excepted)
        return {f"{way}CIDRSet": [block]}
    selector = peer_selector(peer, namespace)
    return {f"{way}Endpoints": [_selector(selector)] if selector is not None else []}
