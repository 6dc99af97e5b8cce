"""What a CiliumL2AnnouncementPolicy says, and what of it cannot be.

Needs: nothing.   Gives: L2Policy, read_policy(), FAULTS.
Source: Cilium 1.17; k8s.io/apimachinery/pkg/apis/meta/v1 LabelSelectorAsSelector.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from cells.kubernetes import CiliumL2AnnouncementPolicy, Selector

BAD_NODES: Final = "io.cilium/bad-node-selector"
BAD_SERVICES: Final = "io.cilium/bad-service-selector"
BAD_INTERFACE: Final = "io.cilium/bad-interface-regex"
FAULTS: Final = (BAD_NODES, BAD_SERVICES, BAD_INTERFACE)
"""Types of conditions."""

_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NOT_OF_RE2: Final = re.compile(r"\(\?(?:[=!>]|<[=!]|P[=>])|\\[1-9]")
"""What Python's expressions have and those of policies have not (github.com/google/re2/wiki/Syntax)."""


class L2Policy(NamedTuple):
    """A policy in force."""

    name: str
    nodes: Selector | None
    services: Selector | None
    interfaces: tuple[re.Pattern[str], ...]
    external: bool
    balancers: bool

    def is_for(self, node_labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels follows it."""
        return self.nodes is None or self.nodes.matches(dict(node_labels))

    def announces(self, service_labels: dict[str, str]) -> bool:
        """Whether it selects a service with these labels."""
        return self.services is None or self.services.matches(service_labels)

    def uses(self, device: str) -> bool:
        """Whether it is for a device of this name: any expression is found in it, or there is none."""
        return not self.interfaces or any(each.search(device) for each in self.interfaces)


def read_policy(policy: CiliumL2AnnouncementPolicy) -> tuple[L2Policy | None, Mapping[str, str]]:
    """What it says, None if it cannot be followed; and what is wrong with it, by type of condition."""
    spec = policy.spec
    faults: dict[str, str] = {}
    for kind, selector in ((BAD_NODES, spec.node_selector), (BAD_SERVICES, spec.service_selector)):
        if wrong := next(_wrong(selector), ""):
            faults[kind] = wrong
    expressions: list[re.Pattern[str]] = []
    for text in spec.interfaces or ():
        try:
            expressions.append(re.compile(text))
        except (re.error, OverflowError, RecursionError) as error:
            faults[BAD_INTERFACE] = f"error parsing regexp {text!r}: {error}"
        if _NOT_OF_RE2.search(text):
            wrong = "back references and looking around are not supported"
            faults[BAD_INTERFACE] = f"error parsing regexp {text!r}: {wrong}"
    if faults:
        return None, faults
    found = L2Policy(
        policy.name,
        spec.node_selector,
        spec.service_selector,
        tuple(expressions),
        spec.external_ips,
        spec.load_balancer_ips,
    )
    return found, {}


def _wrong(selector: Selector | None) -> Iterator[str]:
    if selector is None:
        return
    for key, value in (selector.match_labels or {}).items():
        yield from _wrong_key(key)
        yield from _wrong_value(key, value)
    for one in selector.match_expressions or ():
        yield from _wrong_key(one.key)
        values = one.values or ()
        if one.operator in {"In", "NotIn"}:
            if not values:
                yield f"key {one.key!r}: for 'in', 'notin' operators, values set can't be empty"
            for value in values:
                yield from _wrong_value(one.key, value)
        elif one.operator in {"Exists", "DoesNotExist"}:
            if values:
                yield f"key {one.key!r}: values set must be empty for exists and does not exist"
        else:
            yield f"{one.operator!r} is not a valid label selector operator"


def _wrong_key(key: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not (_PREFIX.fullmatch(prefix) and len(prefix) <= 253)):
        yield f"key {key!r}: expected a label's name, with or without a prefix such as example.com/"


def _wrong_value(key: str, value: str) -> Iterator[str]:
    if value and not _NAME.fullmatch(value):
        yield f"value {value!r} of key {key!r}: expected at most 63 letters, digits, '-', '_' and '.'"
