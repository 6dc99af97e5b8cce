"""Rules by field: which addresses, ports and numbers built-in objects may hold, and what never changes.

Gives: value_errors, immutable_errors, changed, ip_problem.
Source: k8s.io/kubernetes/pkg/apis/{core,discovery}/validation, apiextensions-apiserver's validation of definitions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tests.support.apiserver.errors import FieldError, Obj, Resource, invalid
from tests.support.apiserver.names import label_problem, rfc1035_problem, subdomain_problem

Check = Callable[[Any], str]
UNCHANGED = "field is immutable"


def ip_problem(value: str) -> str:
    """Of addresses: without a zone, without leading zeros."""
    try:
        ipaddress.ip_address(value if "%" not in value else "")
    except ValueError:
        return "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
    return ""


def port_problem(value: int | str) -> str:
    """Of ports by number; those by name have rules of their own."""
    return _between(1, 65535)(value) if isinstance(value, int) else ""


def _cluster_ip(value: str) -> str:
    return "" if value == "None" else ip_problem(value)


def _between(least: int, most: int) -> Check:
    return lambda value: "" if least <= value <= most else f"must be between {least} and {most}, inclusive"


def _not_negative(value: int) -> str:
    return "must be greater than or equal to 0" if value < 0 else ""


def _containers(prefix: str) -> dict[str, Check]:
    ports = {f"{prefix}.ports[*].{one}": port_problem for one in ("containerPort", "hostPort")}
    addresses = {f"{prefix}.ports[*].hostIP": ip_problem}
    probes: dict[str, Check] = {}
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        for action in ("httpGet", "tcpSocket", "grpc"):
            probes[f"{prefix}.{probe}.{action}.port"] = port_problem
        for number in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds"):
            probes[f"{prefix}.{probe}.{number}"] = _not_negative
    return ports | addresses | probes


DEFINITIONS = Resource("apiextensions.k8s.io", "customresourcedefinitions")
VALUES: Mapping[Resource, Mapping[str, Check]] = {
    Resource("", "services"): {
        "spec.clusterIPs[*]": _cluster_ip,
        "spec.externalIPs[*]": ip_problem,
        "spec.ports[*].port": port_problem,
        "spec.ports[*].targetPort": port_problem,
        "status.loadBalancer.ingress[*].ip": ip_problem,
        "status.loadBalancer.ingress[*].hostname": subdomain_problem,
        "status.loadBalancer.ingress[*].ports[*].port": port_problem,
    },
    Resource("", "pods"): {
        **_containers("spec.containers[*]"),
        **_containers("spec.initContainers[*]"),
        "spec.hostAliases[*].ip": ip_problem,
        "spec.dnsConfig.nameservers[*]": ip_problem,
        "spec.activeDeadlineSeconds": _between(1, 2**31 - 1),
    },
    Resource("", "endpoints"): {
        "subsets[*].addresses[*].ip": ip_problem,
        "subsets[*].notReadyAddresses[*].ip": ip_problem,
        "subsets[*].ports[*].port": port_problem,
    },
    DEFINITIONS: {
        "spec.group": subdomain_problem,
        "spec.names.plural": rfc1035_problem,
        "spec.names.singular": rfc1035_problem,
        "spec.names.shortNames[*]": rfc1035_problem,
        "spec.names.kind": lambda name: rfc1035_problem(name.lower()),
        "spec.names.listKind": lambda name: rfc1035_problem(name.lower()),
        "spec.names.categories[*]": rfc1035_problem,
    },
    Resource("discovery.k8s.io", "endpointslices"): {"endpoints[*].hostname": label_problem},
}
"""A list's items are ``[*]``. Not here, as Kubernetes does not check them: addresses of nodes, ports of slices."""

IMMUTABLE: Mapping[Resource, tuple[str, ...]] = {
    DEFINITIONS: ("spec.group", "spec.names.plural"),
    Resource("discovery.k8s.io", "endpointslices"): ("addressType",),
    Resource("", "secrets"): ("type",),
}


def value_errors(obj: Obj, resource: Resource) -> list[FieldError]:
    """What an object of a built-in kind holds that its fields cannot."""
    return [
        invalid(at, value, problem)
        for path, check in VALUES.get(resource, {}).items()
        for at, value in _found(obj, path)
        if value not in (None, "") and (problem := check(value))
    ]


def immutable_errors(new: Obj, old: Obj, resource: Resource) -> list[FieldError]:
    """What a change touches that never changes."""
    return changed(new, old, IMMUTABLE.get(resource, ()))


def changed(new: Obj, old: Obj, paths: Iterable[str], why: str = UNCHANGED) -> list[FieldError]:
    """The refusals of fields that are not as before."""
    pairs = [(path, dict(_found(new, path)), dict(_found(old, path))) for path in paths]
    return [invalid(path, after.get(path, ""), why) for path, after, before in pairs if after != before]


def _found(value: Any, path: str, at: str = "") -> Iterator[tuple[str, Any]]:
    """The values at a path, each with where it stands."""
    if not path:
        yield at, value
        return
    step, _, rest = path.partition(".")
    name, listed, _ = step.partition("[*]")
    inside = value.get(name) if isinstance(value, dict) else None
    if inside is None:
        return
    at = f"{at}.{name}" if at else name
    if not listed:
        yield from _found(inside, rest, at)
        return
    for number, one in enumerate(inside):
        yield from _found(one, rest, f"{at}[{number}]")
