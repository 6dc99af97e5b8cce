"""Rules by field: what names, addresses, ports and numbers built-in objects may hold, and what never changes.

Each function ``*_problem`` gives the problem in words, or nothing.
Source: k8s.io/kubernetes/pkg/apis/{core,discovery}/validation, k8s.io/apimachinery/pkg/util/validation,
apiextensions-apiserver's validation of definitions.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    Resource,
    duplicate,
    invalid,
    required,
    unsupported,
)

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"


def _matches(text: str, pattern: str, most: int, what: str) -> str:
    if len(text.encode()) > most:
        return f"must be no more than {most} bytes"
    return "" if re.fullmatch(pattern, text) else f"must be {what}, regex used for validation is '{pattern}'"


def subdomain_problem(name: str) -> str:
    """Of names of most objects."""
    return _matches(name, rf"{_LABEL}(\.{_LABEL})*", 253, "a lowercase RFC 1123 subdomain")


def label_problem(name: str) -> str:
    """Of RFC 1123 labels: namespaces, ports."""
    return _matches(name, _LABEL, 63, "a lowercase RFC 1123 label")


def rfc1035_problem(name: str) -> str:
    """Of names in definitions."""
    return _matches(name, "[a-z]([-a-z0-9]*[a-z0-9])?", 63, "a DNS-1035 label")


def path_segment_problem(name: str) -> str:
    """Of names of roles and the like."""
    return _matches(name, r"(?!\.{1,2}$)[^/%]+", 1 << 20, "a segment of a path")


def label_value_problem(value: str) -> str:
    """Of values of labels."""
    return _matches(value, f"({_NAME})?", 63, "a valid label")


def qualified_name_problem(name: str) -> str:
    """Of keys of labels and annotations."""
    prefix, slash, own = name.rpartition("/")
    if slash and (problem := subdomain_problem(prefix)):
        return f"prefix part {problem}"
    return _matches(own, _NAME, 63, "a qualified name")


def config_key_problem(key: str) -> str:
    """Of keys of config maps and secrets."""
    return _matches(key, "[-._a-zA-Z0-9]+", 253, "a valid config key")


def port_name_problem(name: str) -> str:
    """Of names of ports (RFC 6335)."""
    return _matches(name, "(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?", 15, "a name of a service")


Check = Callable[[Any], str]
POLICIES = ("Cluster", "Local")
PROTOCOLS = ("SCTP", "TCP", "UDP")
UNCHANGED = "field is immutable"


def ip_problem(value: str) -> str:
    """Of addresses: without a zone, without leading zeros."""
    try:
        ipaddress.ip_address(value if "%" not in value else "")
    except ValueError:
        return "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
    return ""


def cidr_problem(value: str, *, strict: bool = True) -> str:
    """Of prefixes: with a length, and strictly without bits beyond it."""
    try:
        ipaddress.ip_network(value if "/" in value else "", strict=strict)
    except ValueError:
        return "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
    return ""


def port_problem(value: int | str) -> str:
    """Of ports by number; those by name have rules of their own."""
    return _between(1, 65535)(value) if isinstance(value, int) else ""


def target_problem(value: int | str) -> str:
    """Of ports of backends, by number or by name."""
    return port_problem(value) if isinstance(value, int) else port_name_problem(value)


def endpoint_ip_problem(value: str) -> str:
    """Of addresses that something outside can reach."""
    if problem := ip_problem(value):
        return problem
    found = ipaddress.ip_address(value)
    nearby = found.is_multicast and value.startswith(("224.0.0.", "ff02:"))
    for wrong, what in (
        (found.is_unspecified, "unspecified (0.0.0.0 or ::)"),
        (found.is_loopback, "in the loopback range (127.0.0.0/8, ::1/128)"),
        (found.is_link_local, "in the link-local range (169.254.0.0/16, fe80::/10)"),
        (nearby, "in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
    ):
        if wrong:
            return f"may not be {what}"
    return ""


def _cluster_ip(value: str) -> str:
    return "" if value == "None" else ip_problem(value)


def _between(least: int, most: int) -> Check:
    return lambda value: "" if least <= value <= most else f"must be between {least} and {most}, inclusive"


def _not_negative(value: int) -> str:
    return "must be greater than or equal to 0" if value < 0 else ""


def _containers(prefix: str) -> dict[str, Check]:
    ports = {f"{prefix}.ports[*].{one}": port_problem for one in ("containerPort", "hostPort")}
    texts = {
        f"{prefix}.name": label_problem,
        f"{prefix}.ports[*].name": port_name_problem,
        f"{prefix}.ports[*].hostIP": ip_problem,
    }
    probes: dict[str, Check] = {}
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        for action in ("httpGet", "tcpSocket", "grpc"):
            probes[f"{prefix}.{probe}.{action}.port"] = port_problem
        for number in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds"):
            probes[f"{prefix}.{probe}.{number}"] = _not_negative
    return ports | texts | probes


DEFINITIONS = Resource("apiextensions.k8s.io", "customresourcedefinitions")
SERVICES, PODS = Resource("", "services"), Resource("", "pods")
SLICES = Resource("discovery.k8s.io", "endpointslices")
VALUES: Mapping[Resource, Mapping[str, Check]] = {
    SERVICES: {
        "spec.clusterIPs[*]": _cluster_ip,
        "spec.externalIPs[*]": endpoint_ip_problem,
        "spec.loadBalancerClass": qualified_name_problem,
        "spec.ports[*].name": label_problem,
        "spec.ports[*].port": port_problem,
        "spec.ports[*].targetPort": target_problem,
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds": _between(1, 86400),
        "status.loadBalancer.ingress[*].ip": ip_problem,
        "status.loadBalancer.ingress[*].hostname": subdomain_problem,
        "status.loadBalancer.ingress[*].ports[*].port": port_problem,
    },
    PODS: {
        **_containers("spec.containers[*]"),
        **_containers("spec.initContainers[*]"),
        "spec.nodeName": subdomain_problem,
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
    SLICES: {
        "endpoints[*].hostname": label_problem,
        "endpoints[*].nodeName": subdomain_problem,
        "ports[*].name": label_problem,
    },
    Resource("coordination.k8s.io", "leases"): {
        "spec.leaseDurationSeconds": lambda value: "" if value > 0 else "must be greater than 0",
        "spec.leaseTransitions": _not_negative,
    },
}
"""A list's items are ``[*]``. Not here, as Kubernetes does not check them: addresses of nodes, ports of slices."""

CHOICES: Mapping[Resource, Mapping[str, tuple[str, ...]]] = {
    SERVICES: {
        "spec.type": ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort"),
        "spec.sessionAffinity": ("ClientIP", "None"),
        "spec.externalTrafficPolicy": POLICIES,
        "spec.internalTrafficPolicy": POLICIES,
        "spec.trafficDistribution": ("PreferClose", "PreferSameZone", "PreferSameNode"),
        "spec.ports[*].protocol": PROTOCOLS,
        "spec.ipFamilies[*]": ("IPv4", "IPv6"),
        "spec.ipFamilyPolicy": ("PreferDualStack", "RequireDualStack", "SingleStack"),
    },
    PODS: {
        "spec.restartPolicy": ("Always", "OnFailure", "Never"),
        "spec.dnsPolicy": ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"),
        "spec.containers[*].ports[*].protocol": PROTOCOLS,
    },
    SLICES: {"addressType": ("FQDN", "IPv4", "IPv6"), "ports[*].protocol": PROTOCOLS},
}
NEEDED: Mapping[Resource, tuple[str, ...]] = {
    PODS: ("spec.containers", "spec.containers[*].name", "spec.containers[*].image"),
    SLICES: ("addressType", "endpoints[*].addresses"),
}
UNIQUE: Mapping[Resource, tuple[tuple[str, str], ...]] = {
    SERVICES: (("spec.ports", "name"), ("spec.ipFamilies", "")),
    PODS: (("spec.containers", "name"),),
    SLICES: (("ports", "name"),),
}
"""Lists, and what of their items there is only once: a field, or the item."""
LONGEST: Mapping[Resource, Mapping[str, int]] = {
    SLICES: {"endpoints": 1000, "endpoints[*].addresses": 100, "ports": 20000},
}
IMMUTABLE: Mapping[Resource, tuple[str, ...]] = {
    DEFINITIONS: ("spec.group", "spec.names.plural"),
    SLICES: ("addressType",),
    Resource("", "secrets"): ("type",),
}


def value_errors(obj: Obj, resource: Resource) -> list[FieldError]:
    """What an object of a built-in kind holds that its fields cannot."""
    return [*_checked(obj, resource), *_counted(obj, resource)]


def _checked(obj: Obj, resource: Resource) -> Iterator[FieldError]:
    for path, check in VALUES.get(resource, {}).items():
        for at, value in _found(obj, path):
            if value not in (None, "") and (problem := check(value)):
                yield invalid(at, value, problem)
    for path, known in CHOICES.get(resource, {}).items():
        for at, value in _found(obj, path):
            if value not in (None, "") and value not in known:
                yield unsupported(at, value, known)


def _counted(obj: Obj, resource: Resource) -> Iterator[FieldError]:
    for path in NEEDED.get(resource, ()):
        around, _, name = path.rpartition(".")
        for at, value in _found(obj, around) if around else [("", obj)]:
            if not value.get(name):
                yield required(f"{at}.{name}" if at else name)
    for path, name in UNIQUE.get(resource, ()):
        seen: list[Any] = []
        for at, item in _found(obj, f"{path}[*]"):
            if (value := item.get(name, "") if name else item) in seen and (value or resource == SLICES):
                yield duplicate(f"{at}.{name}" if name else at, value)
            seen.append(value)
    for path, most in LONGEST.get(resource, {}).items():
        for at, value in _found(obj, path):
            if len(value or ()) > most:
                yield FieldError("toomany", at, f"{len(value)}: must have at most {most} items")


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
