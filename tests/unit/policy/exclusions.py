"""Lists faults of the recorded policy engine, its extra features, and the differences that they cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from tests.unit.policy.replay import Case, Json

ICMP_ZERO: Final = (0, "0", "EchoReply")
PASSES: Final = ("allow", "redirect", "auth-required")


class Difference(NamedTuple):
    """A recorded verdict, and ours."""

    protocol: str
    identity: int
    recorded: str
    ours: str


class Fault(NamedTuple):
    """The reason of a case's difference, and the only change that it allows."""

    reason: str
    explains: Callable[[Difference], bool]


def _opens(one: Difference) -> bool:
    return one.recorded == "drop" and one.ours in PASSES


def _closes(one: Difference) -> bool:
    return one.recorded in PASSES and one.ours == "drop"


VISIBILITY: Final = Fault(
    "proxy visibility annotations are gone from 1.17",
    lambda one: (one.protocol, one.recorded, one.ours) == ("TCP", "redirect", "allow"),
)
POLICY_TYPES: Final = Fault("policyTypes decides, as Kubernetes says", _opens)
ICMP_TYPE_ZERO: Final = Fault(
    "ICMP type 0 is a type, not every type", lambda one: one.protocol == "ICMP" and _closes(one)
)
RANGE_FROM_ZERO: Final = Fault("a range from port 0 is no wildcard", _closes)
GROUP: Final = Fault("a CIDR group empties only itself", _opens)
ODD_DENY: Final = Fault(
    "a deny rule's port has the name that it is written with", lambda one: one.ours == "deny"
)
WIDE_DENY: Final = Fault(
    "a deny rule that cannot be read denies all it could mean", lambda one: one.ours == "deny"
)
CLOSED: Final = Fault(
    "an allow rule that cannot be enforced allows nothing", lambda one: one.ours not in PASSES
)
BESIDE_PLAIN: Final = Fault(
    "beside a plain rule for the same peers, one for requests lets all of them pass",
    lambda one: (one.recorded, one.ours) == ("redirect", "allow"),
)
ONE_FAMILY: Final = Fault(
    "a deny of one family leaves the other alone",
    lambda one: one.identity in (2, 9, 10) and one.recorded == "deny" and one.ours in PASSES,
)


def upstream_faults(case: Case) -> list[Fault]:
    """Return why a case's verdicts or entries must differ: empty for most."""
    recording = case.recording
    policies = [one for one in recording["objects"] if "spec" in one or "specs" in one]
    specs = [spec for one in policies for spec in (one.get("spec"), *(one.get("specs") or ())) if spec]
    holds = {
        VISIBILITY: _has_visibility(recording),
        POLICY_TYPES: any(map(_other_policy_type, policies)),
        ICMP_TYPE_ZERO: any(map(_icmp_zero, specs)),
        RANGE_FROM_ZERO: any(map(_range_from_zero, specs)),
        GROUP: any(map(_group_beside_others, policies)),
        ODD_DENY: any(map(_odd_deny, specs)),
        WIDE_DENY: any("Deny[" in one.path for one in case.unenforced),
        CLOSED: any("Deny[" not in one.path for one in case.unenforced),
        BESIDE_PLAIN: case.name == "l7-kafka-plus-l4" and bool(case.unenforced),
        ONE_FAMILY: _world_of_one_family(case, specs),
    }
    return [fault for fault, there in holds.items() if there]


def _has_visibility(recording: Json) -> bool:
    return any("proxy_visibility" in one for one in recording["endpoints"])


def _other_policy_type(policy: Json) -> bool:
    spec = policy.get("spec") or {}
    types = spec.get("policyTypes") or ()
    return (
        policy["kind"] == "NetworkPolicy"
        and bool(types)
        and (
            (bool(spec.get("ingress")) and "Ingress" not in types)
            or (bool(spec.get("egress")) and "Egress" not in types)
        )
    )


def _values(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from _values(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, key)


def _icmp_zero(spec: Json) -> bool:
    return any(
        field.get("type") in ICMP_ZERO and field.get("family", "IPv4") == "IPv4"
        for fields in _values(spec, "fields")
        for field in fields
    )


def _range_from_zero(spec: Json) -> bool:
    return any(
        str(port.get("port")) == "0" and 0 < (port.get("endPort") or 0) < 65535
        for ports in _values(spec, "ports")
        for port in ports or ()
    )


def _group_beside_others(policy: Json) -> bool:
    rules = [
        rule
        for spec in (policy.get("spec"), *(policy.get("specs") or ()))
        for direction in ("ingress", "egress", "ingressDeny", "egressDeny")
        for rule in (spec or {}).get(direction) or ()
    ]
    with_group = [rule for rule in rules if list(_values(rule, "cidrGroupRef"))]
    return bool(with_group) and any("CIDRSet" not in str(rule) for rule in rules)


def _odd_deny(spec: Json) -> bool:
    """Return whether a deny rule has a named port in upper case, which never matches upstream."""
    return any(
        str(port.get("port")) != str(port.get("port")).lower()
        for direction in ("ingressDeny", "egressDeny")
        for ports in _values(spec.get(direction), "ports")
        for port in ports or ()
    )


def _world_of_one_family(case: Case, specs: list[Json]) -> bool:
    denied = {
        str(prefix)
        for spec in specs
        for direction in ("ingressDeny", "egressDeny")
        for key in ("toCIDR", "fromCIDR", "cidr")
        for value in _values(spec.get(direction), key)
        for prefix in (value if isinstance(value, list) else [value])
    }
    return case.options.dual_stack and len(denied & {"0.0.0.0/0", "::/0"}) == 1 and "world" in str(specs)
