"""What a service asks for by its annotations.

Gives: Wishes, wishes_of, faults_of, is_exposed.
Source: Cilium 1.17, pkg/annotation/k8s.go. Text that means nothing is as if it were not there, and told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from cells.kubernetes import Service
from cells.services.model.options import EXPOSURE_LABEL, LoadBalancerOptions, Node

PREFIX = "service.cilium.io/"
TYPES = PREFIX + "type"
"""Which frontends a service has, such as ``LoadBalancer`` or ``LoadBalancer,ClusterIP``."""
ALGORITHM = PREFIX + "lb-algorithm"
"""``random`` or ``maglev``, where bpf-lb-algorithm-annotation lets services say so."""
FORWARDING = PREFIX + "forwarding-mode"
"""``dsr`` or ``snat``, where bpf-lb-mode-annotation or bpf-lb-algorithm-annotation lets services say so."""
SOURCE_RANGES = PREFIX + "src-ranges-policy"
"""``deny``, for all clients but those of loadBalancerSourceRanges; else ``allow``."""
NODE_SELECTOR = PREFIX + "node-selector"
"""The nodes that have the service, as a selector of their labels; goes before EXPOSURE_LABEL."""

_TYPES = frozenset({"ClusterIP", "NodePort", "LoadBalancer"})
_READ = (FORWARDING, ALGORITHM, EXPOSURE_LABEL, NODE_SELECTOR, SOURCE_RANGES, TYPES)
_REQUESTS = "requests are not balanced, connections are"
_CLUSTERS = "other clusters are not joined"
_NOT_BUILT = {
    PREFIX + "lb-l7": ("enabled", _REQUESTS),
    PREFIX + "lb-l7-algorithm": ("", _REQUESTS),
    PREFIX + "proxy-delegation": ("delegate-if-local", "packets are not handed to a proxy of the node"),
    PREFIX + "global": ("true", _CLUSTERS),
    PREFIX + "global-sync-endpoint-slices": ("true", _CLUSTERS),
    PREFIX + "affinity": ("", ""),
    PREFIX + "shared": ("", ""),
    PREFIX + "weight": ("", "it is one of EndpointSlices, whose backends it weighs"),
}
"""Annotations, the value that asks for something, and what happens instead.

Without a value every one asks. What is only read together with another one is told of with that.
"""


class Wishes(msgspec.Struct, frozen=True, gc=False):
    """What the annotations of a service mean here."""

    types: frozenset[str] = _TYPES
    algorithm: str = ""
    forwarding: str = ""
    deny: bool = False


NOTHING = Wishes()


def wishes_of(service: Service, options: LoadBalancerOptions) -> Wishes:
    """Read them; what the agent does not let services choose is left out."""
    given = service.metadata.annotations
    if not given:
        return NOTHING
    algorithm = given.get(ALGORITHM, "").lower() if options.bpf_lb_algorithm_annotation else ""
    forwarding = given.get(FORWARDING, "").lower() if options.bpf_lb_mode_annotation else ""
    return Wishes(
        types=_types(given.get(TYPES, "")) or _TYPES,
        algorithm=algorithm if algorithm in {"random", "maglev"} else "",
        forwarding=forwarding if forwarding in {"dsr", "snat"} else "",
        deny=given.get(SOURCE_RANGES, "").lower() == "deny",
    )


def _types(text: str) -> frozenset[str]:
    """None of them if one is not known."""
    asked = frozenset(one.strip() for one in text.split(",")) if text else frozenset()
    return asked if asked <= _TYPES else frozenset()


def is_exposed(service: Service, node: Node) -> bool:
    """Whether this node is to have the service. A selector that cannot be read selects no node."""
    metadata = service.metadata
    given = metadata.annotations or {}
    selector = given.get(NODE_SELECTOR)
    if selector is not None:
        try:
            return selects(selector, node.labels or {})
        except ValueError:
            return False
    wanted = given.get(EXPOSURE_LABEL, (metadata.labels or {}).get(EXPOSURE_LABEL))
    return wanted is None or wanted == node.exposure


def faults_of(service: Service, options: LoadBalancerOptions) -> Iterator[tuple[str, str]]:
    """Annotations that do nothing, with the reason, for the log."""
    given = service.metadata.annotations
    for name, text in (given or {}).items():
        if name.startswith(PREFIX) and (fault := _fault(name, text, service, options)):
            yield name, fault


def _fault(name: str, text: str, service: Service, options: LoadBalancerOptions) -> str:
    if name in (ALGORITHM, FORWARDING):
        return _fault_of_choice(name, text, service, options)
    if name in _FAULTS:
        return _FAULTS[name](text, service, options)
    if name in _NOT_BUILT:
        asks, instead = _NOT_BUILT[name]
        return f"not supported: {instead}" if instead and text.lower() == (asks or text.lower()) else ""
    known = ", ".join(each.removeprefix(PREFIX) for each in _READ)
    return "" if name in _READ else f"not known: expected one of {known}"


def _fault_of_types(text: str, service: Service, _: LoadBalancerOptions) -> str:
    if not text:
        return ""
    wanted, spec = _types(text), service.spec
    if not wanted:
        return f"{text!r}: expected ClusterIP, NodePort or LoadBalancer, or a list of them: all are served"
    has = {
        "ClusterIP": spec.type != "ExternalName",
        "NodePort": spec.type in ("NodePort", "LoadBalancer"),
        "LoadBalancer": spec.type == "LoadBalancer" or bool(service.status.load_balancer.ingress),
    }
    if any(has[one] for one in wanted):
        return ""
    return f"{text!r}: a service of type {spec.type or 'ClusterIP'} has no such address: it is not served"


def _fault_of_ranges(text: str, service: Service, options: LoadBalancerOptions) -> str:
    if text.lower() not in {"allow", "deny"}:
        return f"{text!r}: expected allow or deny: only the ranges are served"
    if text.lower() != "deny":
        return ""
    if not options.enable_svc_source_range_check:
        return "enable-svc-source-range-check is off: no client is refused"
    if not service.spec.load_balancer_source_ranges:
        return "the service has no loadBalancerSourceRanges: no client is refused"
    return ""


def _fault_of_selector(text: str, _: Service, __: LoadBalancerOptions) -> str:
    try:
        selects(text, {})
    except ValueError as error:
        return f"{error}: no node has the service"
    return ""


_FAULTS = {TYPES: _fault_of_types, SOURCE_RANGES: _fault_of_ranges, NODE_SELECTOR: _fault_of_selector}


def _fault_of_choice(name: str, text: str, service: Service, options: LoadBalancerOptions) -> str:
    may, words, setting = {
        ALGORITHM: (options.bpf_lb_algorithm_annotation, ("random", "maglev"), "bpf-lb-algorithm-annotation"),
        FORWARDING: (options.bpf_lb_mode_annotation, ("dsr", "snat"), "bpf-lb-mode-annotation"),
    }[name]
    if not may:
        return f"{setting} is off"
    if text.lower() not in words:
        return f"{text!r}: expected {' or '.join(words)}"
    return "" if _is_outside(service, options) else "no address of the service is served to clients outside"


def _is_outside(service: Service, options: LoadBalancerOptions) -> bool:
    """Whether clients outside may come to have an address of the service."""
    spec = service.spec
    return (
        options.bpf_lb_external_clusterip
        or (options.enable_node_port and spec.type in ("NodePort", "LoadBalancer"))
        or (options.enable_node_port and bool(service.status.load_balancer.ingress))
        or (options.enable_external_ips and bool(spec.external_ips))
    )


_TERM = re.compile(
    r"\s*(?:"
    r"!\s*(?P<absent>[\w./-]+)"
    r"|(?P<among>[\w./-]+)\s+(?P<operator>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<key>[\w./-]+)\s*(?P<sign>==|=|!=)\s*(?P<value>[\w.-]*)"
    r"|(?P<present>[\w./-]+)"
    r")\s*"
)


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels fulfil a selector as kubectl takes it: ``a=b,c in (d,e),!f``.

    An empty one selects everything. Raises ValueError for what is none.
    """
    at, fulfilled = 0, True
    while at < len(selector.rstrip()):
        term = _TERM.match(selector, at)
        if term is None or selector[term.end() : term.end() + 1] not in {"", ","}:
            raise ValueError(f"{selector!r}: expected a label selector such as 'a=b,c in (d,e),!f'")
        fulfilled &= _fulfilled(term, labels)
        at = term.end() + 1
    return fulfilled


def _fulfilled(term: re.Match[str], labels: Mapping[str, str]) -> bool:
    found = term.groupdict()
    if found["absent"] is not None:
        return found["absent"] not in labels
    if found["present"] is not None:
        return found["present"] in labels
    if found["among"] is not None:
        values = {one.strip() for one in found["values"].split(",")}
        return (labels.get(found["among"]) in values) == (found["operator"] == "in")
    return (labels.get(found["key"]) == found["value"]) == (found["sign"] != "!=")
