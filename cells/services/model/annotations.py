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
"""``dsr`` or ``snat``, where bpf-lb-mode-annotation lets services say so."""
SOURCE_RANGES = PREFIX + "src-ranges-policy"
"""``deny``, for all clients but those of loadBalancerSourceRanges; else ``allow``."""
NODE_SELECTOR = PREFIX + "node-selector"
"""The nodes that have the service, as a selector of their labels; goes before EXPOSURE_LABEL."""

_TYPES = frozenset({"ClusterIP", "NodePort", "LoadBalancer"})
_NOT_BUILT = {
    PREFIX + "lb-l7": ("enabled", "requests are not balanced, connections are"),
    PREFIX + "proxy-delegation": ("delegate-if-local", "packets are not handed to a proxy of the node"),
}
"""Annotations, the value that asks for something, and what happens instead."""


class Wishes(msgspec.Struct, frozen=True, gc=False):
    """What the annotations of a service mean here."""

    types: frozenset[str] = _TYPES
    algorithm: str = ""
    forwarding: str = ""
    deny: bool = False


NOTHING = Wishes()


def wishes_of(service: Service, options: LoadBalancerOptions) -> Wishes:
    """Read them; what the agent does not let services choose is left out."""
    given = service.metadata.annotations if options.annotations else None
    if not given:
        return NOTHING
    algorithm = given.get(ALGORITHM, "") if options.bpf_lb_algorithm_annotation else ""
    forwarding = given.get(FORWARDING, "") if options.bpf_lb_mode_annotation else ""
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


def is_exposed(service: Service, node: Node, options: LoadBalancerOptions) -> bool:
    """Whether this node is to have the service. A selector that cannot be read selects no node."""
    metadata = service.metadata
    given = (metadata.annotations if options.annotations else None) or {}
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
    given = service.metadata.annotations if options.annotations else None
    for name, text in (given or {}).items():
        if name.startswith(PREFIX) and (fault := _fault(name, text, options)):
            yield name, fault


def _fault(name: str, text: str, options: LoadBalancerOptions) -> str:
    if name == TYPES and text and not _types(text):
        return f"{text!r}: expected ClusterIP, NodePort or LoadBalancer, or a list of them: all are served"
    if name in (ALGORITHM, FORWARDING):
        return _fault_of_choice(name, text, options)
    if name == SOURCE_RANGES and text.lower() not in {"allow", "deny"}:
        return f"{text!r}: expected allow or deny: only the ranges are served"
    if name == NODE_SELECTOR:
        try:
            selects(text, {})
        except ValueError as error:
            return f"{error}: no node has the service"
    asks, instead = _NOT_BUILT.get(name, ("", ""))
    return f"not supported: {instead}" if asks and text.lower() == asks else ""


def _fault_of_choice(name: str, text: str, options: LoadBalancerOptions) -> str:
    may, words, setting = {
        ALGORITHM: (options.bpf_lb_algorithm_annotation, ("random", "maglev"), "bpf-lb-algorithm-annotation"),
        FORWARDING: (options.bpf_lb_mode_annotation, ("dsr", "snat"), "bpf-lb-mode-annotation"),
    }[name]
    if not may:
        return f"{setting} is off"
    return "" if text in words else f"{text!r}: expected {' or '.join(words)}"


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
