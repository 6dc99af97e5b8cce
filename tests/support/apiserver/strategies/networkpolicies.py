"""Network policies.

Gives: NetworkPolicies.
"""

from __future__ import annotations

import ipaddress
from typing import Any, ClassVar

from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid, required, unsupported
from tests.support.apiserver.kinds import Strategy
from tests.support.apiserver.names import port_name_problem
from tests.support.apiserver.selectors import selector_errors


class NetworkPolicies(Strategy):
    """Defaulted and checked as the server does."""

    empty: ClassVar[Obj] = {"spec": {"podSelector": {}}}
    generations = True

    def defaults(self, obj: Obj) -> None:
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return
        spec.setdefault("podSelector", {})
        for direction in ("ingress", "egress"):
            for rule in spec.get(direction) or ():
                for port in rule.get("ports") or ():
                    port.setdefault("protocol", "TCP")
        if not spec.get("policyTypes"):
            spec["policyTypes"] = ["Ingress", *(["Egress"] if spec.get("egress") else [])]

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        spec = obj.get("spec") or {}
        found = selector_errors(spec.get("podSelector"), "spec.podSelector")
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for number, rule in enumerate(spec.get(direction) or ()):
                at = f"spec.{direction}[{number}]"
                for n, port in enumerate(rule.get("ports") or ()):
                    found += _port_errors(port, f"{at}.ports[{n}]")
                for n, peer in enumerate(rule.get(peers) or ()):
                    found += _peer_errors(peer, f"{at}.{peers}[{n}]")
        types = spec.get("policyTypes") or []
        if len(types) > 2:
            found.append(invalid("spec.policyTypes", types, "may not specify more than two policyTypes"))
            return found
        for number, one in enumerate(types):
            if one not in {"Ingress", "Egress"}:
                found.append(unsupported(f"spec.policyTypes[{number}]", one, ["Ingress", "Egress"]))
        return found


def _port_errors(port: Obj, at: str) -> list[FieldError]:
    found: list[FieldError] = []
    protocol = port.get("protocol")
    if protocol not in {"TCP", "UDP", "SCTP"}:
        found.append(unsupported(f"{at}.protocol", protocol, ["TCP", "UDP", "SCTP"]))
    number, last = port.get("port"), port.get("endPort")
    if isinstance(number, int):
        if not 1 <= number <= 65535:
            found.append(invalid(f"{at}.port", number, "must be between 1 and 65535, inclusive"))
        if last is not None:
            if last < number:
                found.append(invalid(f"{at}.endPort", number, "must be greater than or equal to `port`"))
            if not 1 <= last <= 65535:
                found.append(invalid(f"{at}.endPort", last, "must be between 1 and 65535, inclusive"))
    elif last is not None:
        why = "may not be specified when `port` is " + ("not specified" if number is None else "non-numeric")
        found.append(invalid(f"{at}.endPort", last, why))
    if isinstance(number, str) and (problem := port_name_problem(number)):
        found.append(invalid(f"{at}.port", number, problem))
    return found


def _peer_errors(peer: Obj, at: str) -> list[FieldError]:
    found: list[FieldError] = []
    count = 0
    for name in ("podSelector", "namespaceSelector"):
        if name in peer:
            count += 1
            found += selector_errors(peer[name], f"{at}.{name}")
    block = peer.get("ipBlock")
    if block is not None:
        if count:
            return [*found, forbidden(at, "may not specify both ipBlock and another peer")]
        count += 1
        found += _block_errors(block, f"{at}.ipBlock")
    if not count:
        found.append(required(at, "must specify a peer"))
    return found


def _block_errors(block: Obj, at: str) -> list[FieldError]:
    cidr = block.get("cidr", "")
    why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
    if not cidr:
        return [required(f"{at}.cidr")]
    try:
        network = ipaddress.ip_network(cidr if "/" in cidr else "none", strict=False)
    except ValueError:
        return [invalid(f"{at}.cidr", cidr, why)]
    if str(network.network_address) != cidr.partition("/")[0]:
        return [invalid(f"{at}.cidr", cidr, "must not have bits set beyond the prefix length")]
    found = []
    for number, one in enumerate(block.get("except") or ()):
        where = f"{at}.except[{number}]"
        try:
            inner = ipaddress.ip_network(one, strict=False)
        except ValueError:
            found.append(invalid(where, one, why))
            continue
        inside = inner.version == network.version and inner.prefixlen > network.prefixlen
        if not inside or inner.network_address not in network:
            found.append(invalid(where, one, "must be a strict subset of `cidr`"))
    return found
