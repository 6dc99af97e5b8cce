"""Services: their addresses, families and ports.

Gives: Services.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    StatusError,
    forbidden,
    internal,
    invalid,
    required,
    unprocessable,
    unsupported,
)
from tests.support.apiserver.kinds import Strategy
from tests.support.apiserver.metadata import label_errors
from tests.support.apiserver.names import label_problem, port_name_problem, subdomain_problem
from tests.support.apiserver.rules import changed, ip_problem
from tests.support.apiserver.strategies.simple import special_address_errors

TYPES = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]
POLICIES = ["PreferDualStack", "RequireDualStack", "SingleStack"]
DUAL = {"PreferDualStack", "RequireDualStack"}


class Services(Strategy):
    """Given addresses and node ports when they are stored."""

    empty: ClassVar[Obj] = {"spec": {}, "status": {"loadBalancer": {}}}
    answers_object = True
    create_on_update = True
    resets = (("f:status",),)
    fields: ClassVar[Mapping[str, str]] = {
        "metadata.name": "metadata.name",
        "metadata.namespace": "metadata.namespace",
        "spec.clusterIP": "spec.clusterIP",
        "spec.type": "spec.type",
    }

    def name_problem(self, name: str) -> str:
        problem = label_problem(name)
        return (
            "must not contain dots"
            if problem and "." in name and not label_problem(name.replace(".", "-"))
            else problem
        )

    def defaults(self, obj: Obj) -> None:
        spec = obj.get("spec") or {}
        obj["spec"] = spec
        spec.setdefault("sessionAffinity", "None")
        spec.setdefault("type", "ClusterIP")
        if spec["sessionAffinity"] == "ClientIP":
            config = spec.setdefault("sessionAffinityConfig", {}).setdefault("clientIP", {})
            config.setdefault("timeoutSeconds", 10800)
        elif spec["sessionAffinity"] == "None":
            spec.pop("sessionAffinityConfig", None)
        for port in spec.get("ports") or ():
            port.setdefault("protocol", "TCP")
            if port.get("targetPort") in {None, 0, ""}:
                port["targetPort"] = port.get("port", 0)
        if spec["type"] != "ExternalName":
            spec.setdefault("internalTrafficPolicy", "Cluster")
        if spec["type"] in {"NodePort", "LoadBalancer"} or (
            spec["type"] == "ClusterIP" and spec.get("externalIPs")
        ):
            spec.setdefault("externalTrafficPolicy", "Cluster")
        if spec["type"] == "LoadBalancer":
            spec.setdefault("allocateLoadBalancerNodePorts", True)
        obj.setdefault("status", {}).setdefault("loadBalancer", {})

    def admit_create(self, obj: Obj, server: Any) -> None:
        spec = obj["spec"]
        if spec.get("clusterIP") and not spec.get("clusterIPs"):
            spec["clusterIPs"] = [spec["clusterIP"]]

    def prepare_create(self, obj: Obj, server: Any) -> None:
        spec, ranges = obj["spec"], server.ranges
        obj["status"] = {"loadBalancer": {}}
        if spec["type"] == "ExternalName":
            return
        _choose_families(obj, ranges)
        _give_addresses(obj, ranges)
        _give_ports(obj, ranges)

    def prepare_update(self, obj: Obj, old: Obj, server: Any) -> None:
        spec, before, ranges = obj["spec"], old["spec"], server.ranges
        _drop_dependent(obj, old)
        if spec["type"] == "ExternalName":
            return
        if before.get("type") != "ExternalName":
            for name in ("clusterIP", "clusterIPs", "ipFamilies"):
                if name in before and not spec.get(name):
                    spec[name] = before[name]
        changed_policy = spec.get("ipFamilyPolicy") != before.get("ipFamilyPolicy")
        if (
            changed_policy
            and spec.get("ipFamilyPolicy") in DUAL
            and len(spec.get("ipFamilies") or ()) < 2 < len(ranges.families) + 1
        ):
            other = next(one for one in ranges.families if one not in spec["ipFamilies"])
            spec["ipFamilies"] = [*spec["ipFamilies"], other]
            if spec.get("clusterIP") != "None":
                spec["clusterIPs"] = [*spec["clusterIPs"], ranges.address(other)]
        if changed_policy and spec.get("ipFamilyPolicy") == "SingleStack":
            spec["ipFamilies"] = spec["ipFamilies"][:1]
            spec["clusterIPs"] = spec["clusterIPs"][:1]
        if spec.get("clusterIP") and spec.get("clusterIPs") and spec["clusterIP"] != spec["clusterIPs"][0]:
            spec["clusterIPs"] = [spec["clusterIP"]]
        _give_ports(obj, ranges, before)

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        spec, found = obj["spec"], []
        if not spec.get("ports") and spec["type"] != "ExternalName" and spec.get("clusterIP") != "None":
            found.append(required("spec.ports"))
        found += _port_errors(spec)
        found += label_errors(spec.get("selector") or {}, "spec.selector")
        if spec.get("sessionAffinity") not in {"ClientIP", "None"}:
            found.append(
                unsupported("spec.sessionAffinity", spec.get("sessionAffinity"), ["ClientIP", "None"])
            )
        seconds = ((spec.get("sessionAffinityConfig") or {}).get("clientIP") or {}).get("timeoutSeconds")
        if seconds is not None and not 0 < seconds <= 86400:
            at = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
            found.append(invalid(at, seconds, "must be greater than 0 and less than 86400"))
        if spec["type"] not in TYPES:
            found.append(unsupported("spec.type", spec["type"], TYPES))
        found += _address_errors(spec) + _type_errors(spec) + _policy_errors(spec)
        return found + _family_errors(spec, server.ranges)

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found: list[FieldError] = []
        before, after = old["spec"], obj["spec"]
        if before.get("clusterIPs") and after["type"] != "ExternalName" and before["type"] != "ExternalName":
            first = (after.get("clusterIPs") or [""])[0]
            if first != before["clusterIPs"][0]:
                found.append(
                    invalid("spec.clusterIPs[0]", after.get("clusterIPs"), "may not change once set")
                )
        if found:
            return found
        if before["type"] == after["type"] == "LoadBalancer":
            found += changed(obj, old, ["spec.loadBalancerClass"], "may not change once set")
        return found + self.validate(obj, server)

    def warnings(self, obj: Obj) -> list[str]:
        spec = obj.get("spec") or {}
        if isinstance(spec, dict) and spec.get("clusterIP") == "None" and spec.get("externalIPs"):
            return ["spec.externalIPs is ignored for headless services"]
        return []

    def deleted(self, obj: Obj, server: Any) -> None:
        server.ranges.release(obj)


def _drop_dependent(obj: Obj, old: Obj) -> None:
    """What belongs to the type a service had, and was not set anew."""
    spec, before = obj["spec"], old["spec"]
    outside = {"NodePort", "LoadBalancer"}
    if before.get("type") in outside and spec["type"] not in outside:
        if not spec.get("externalIPs"):
            spec.pop("externalTrafficPolicy", None)
        held = {one.get("nodePort") for one in before.get("ports") or ()}
        for port in spec.get("ports") or ():
            if port.get("nodePort") in held:
                port.pop("nodePort", None)
    if before.get("type") == "LoadBalancer" and spec["type"] != "LoadBalancer":
        for name in ("allocateLoadBalancerNodePorts", "healthCheckNodePort", "loadBalancerClass"):
            if spec.get(name) == before.get(name):
                spec.pop(name, None)
        obj["status"] = {**(obj.get("status") or {}), "loadBalancer": {}}


def _choose_families(obj: Obj, ranges: Any) -> None:
    spec = obj["spec"]
    headless = spec.get("clusterIP") == "None"
    given = list(spec.get("ipFamilies") or ())
    if headless and not spec.get("selector"):
        policy = spec.get("ipFamilyPolicy") or "RequireDualStack"
        families = given or (["IPv4", "IPv6"] if policy in DUAL else ["IPv4"])
        if policy in DUAL and len(families) == 1:
            families.append("IPv6" if families[0] == "IPv4" else "IPv4")
        spec["ipFamilies"], spec["ipFamilyPolicy"] = families, policy
        return
    if not given:
        addresses = spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else [])
        given = ["IPv6" if ":" in one else "IPv4" for one in addresses if one != "None"]
    policy = spec.get("ipFamilyPolicy") or ("RequireDualStack" if len(given) > 1 else "SingleStack")
    if not given:
        given = [ranges.families[0]]
    if policy in DUAL and len(given) == 1 and len(ranges.families) > 1:
        given.append("IPv6" if given[0] == "IPv4" else "IPv4")
    spec["ipFamilies"], spec["ipFamilyPolicy"] = given, policy


def _give_addresses(obj: Obj, ranges: Any) -> None:
    spec = obj["spec"]
    if spec.get("clusterIP") == "None":
        spec["clusterIPs"] = ["None"]
        return
    given = list(spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else []))
    for address in given:
        if problem := ranges.take(address):
            _refuse(obj, "spec.clusterIPs", given, f"failed to allocate IP {address}: {problem}")
    given.extend(ranges.address(family) for family in spec["ipFamilies"][len(given) :])
    spec["clusterIP"], spec["clusterIPs"] = given[0], given


def _give_ports(obj: Obj, ranges: Any, before: Obj | None = None) -> None:
    spec = obj["spec"]
    wants = (
        spec["type"] in {"NodePort", "LoadBalancer"}
        and spec.get("allocateLoadBalancerNodePorts", True) is not False
    )
    ports, old = spec.get("ports") or [], (before or {}).get("ports") or []
    held = {one.get("nodePort") for one in old}
    by_port = {(one["port"], one.get("protocol")): one.get("nodePort") for one in old}
    shared: dict[int, int] = {}  # port -> node port: protocols of one service share it
    for number, port in enumerate(ports):
        asked = port.get("nodePort")
        if asked and asked not in held:
            if problem := ranges.take_port(asked):
                _refuse(obj, f"spec.ports[{number}].nodePort", asked, problem)
            held.add(asked)
        elif asked and not wants and before is not None:
            port.pop("nodePort")
        if port.get("nodePort") and before is None:
            shared.setdefault(port["port"], port["nodePort"])
    for port in ports:
        if wants and not port.get("nodePort"):
            found = by_port.get((port["port"], port.get("protocol"))) or shared.get(port["port"])
            port["nodePort"] = found or ranges.port()
            if before is None:
                shared[port["port"]] = port["nodePort"]
    local = spec["type"] == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"
    health, health_before = spec.get("healthCheckNodePort"), (before or {}).get("healthCheckNodePort")
    if local and not health:
        spec["healthCheckNodePort"] = health_before or ranges.port()
    elif local and health != health_before and (problem := ranges.take_port(health)):
        raise internal(f"failed to allocate requested HealthCheck NodePort {health}: {problem}")


def _refuse(obj: Obj, at: str, value: object, why: str) -> None:
    error: StatusError = unprocessable("", "Service", obj["metadata"]["name"], [invalid(at, value, why)])
    raise error


def _port_errors(spec: Obj) -> list[FieldError]:
    ports, found = spec.get("ports") or [], []
    names: set[str] = set()
    seen: set[tuple[Any, Any]] = set()
    seen_outside: set[tuple[Any, Any]] = set()
    for number, port in enumerate(ports):
        at, name = f"spec.ports[{number}]", port.get("name", "")
        if len(ports) > 1 and not name:
            found.append(required(f"{at}.name"))
        elif name and (problem := label_problem(name)):
            found.append(invalid(f"{at}.name", name, problem))
        elif name and name in names:
            found.append(FieldError("duplicate", f"{at}.name", "", name))
        names.add(name)
        if port.get("protocol") not in {"TCP", "UDP", "SCTP"}:
            found.append(unsupported(f"{at}.protocol", port.get("protocol"), ["SCTP", "TCP", "UDP"]))
        target = port.get("targetPort")
        if isinstance(target, str) and (problem := port_name_problem(target)):
            found.append(invalid(f"{at}.targetPort", target, problem))
        key = (port.get("port"), port.get("protocol"))
        if key in seen:
            value = {
                "Name": "",
                "Protocol": key[1],
                "AppProtocol": None,
                "Port": key[0],
                "TargetPort": 0,
                "NodePort": 0,
            }
            found.append(FieldError("duplicate", at, "", value))
        seen.add(key)
        if node_port := port.get("nodePort"):
            if (node_port, port.get("protocol")) in seen_outside:
                found.append(FieldError("duplicate", f"{at}.nodePort", "", node_port))
            seen_outside.add((node_port, port.get("protocol")))
        if node_port and spec["type"] == "ClusterIP":
            found.append(forbidden(f"{at}.nodePort", "may not be used when `type` is 'ClusterIP'"))
    return found


def _address_errors(spec: Obj) -> list[FieldError]:
    found: list[FieldError] = []
    for number, one in enumerate(spec.get("externalIPs") or ()):
        if not ip_problem(one):
            found += special_address_errors(one, f"spec.externalIPs[{number}]")
    for number, one in enumerate(spec.get("loadBalancerSourceRanges") or ()):
        try:
            ipaddress.ip_network(one.strip(), strict=False)
        except ValueError:
            why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
            found.append(invalid(f"spec.LoadBalancerSourceRanges[{number}]", one, why))
    return found


def _type_errors(spec: Obj) -> list[FieldError]:
    found: list[FieldError] = []
    kind = spec["type"]
    if kind == "ExternalName":
        if spec.get("clusterIP") or spec.get("clusterIPs"):
            found.append(forbidden("spec.clusterIPs", "may not be set for ExternalName services"))
        name = spec.get("externalName", "").rstrip(".")
        if not name:
            found.append(required("spec.externalName"))
        elif problem := subdomain_problem(name):
            found.append(invalid("spec.externalName", spec["externalName"], problem))
    if spec.get("clusterIP") == "None" and kind in {"NodePort", "LoadBalancer"}:
        why = f"may not be set to 'None' for {kind} services"
        found.append(invalid("spec.clusterIPs[0]", "None", why))
    if spec.get("clusterIPs") and not spec.get("clusterIP"):
        found.append(
            invalid("spec.clusterIPs", spec["clusterIPs"], "must be empty when `clusterIP` is not specified")
        )
    if spec.get("loadBalancerClass") and kind != "LoadBalancer":
        found.append(forbidden("spec.loadBalancerClass", "may only be used when `type` is 'LoadBalancer'"))
    return found


def _policy_errors(spec: Obj) -> list[FieldError]:
    found: list[FieldError] = []
    external = spec["type"] in {"NodePort", "LoadBalancer"} or bool(spec.get("externalIPs"))
    policy = spec.get("externalTrafficPolicy")
    if policy and not external:
        found.append(
            invalid(
                "spec.externalTrafficPolicy", policy, "may only be set for externally-accessible services"
            )
        )
    elif policy and policy not in {"Cluster", "Local"}:
        found.append(unsupported("spec.externalTrafficPolicy", policy, ["Cluster", "Local"]))
    if spec.get("healthCheckNodePort") and not (spec["type"] == "LoadBalancer" and policy == "Local"):
        why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        found.append(invalid("spec.healthCheckNodePort", spec["healthCheckNodePort"], why))
    inside = spec.get("internalTrafficPolicy")
    if inside and inside not in {"Cluster", "Local"}:
        found.append(unsupported("spec.internalTrafficPolicy", inside, ["Cluster", "Local"]))
    spread, known = spec.get("trafficDistribution"), ["PreferClose", "PreferSameZone", "PreferSameNode"]
    if spread and spread not in known:
        found.append(unsupported("spec.trafficDistribution", spread, known))
    return found


def _family_errors(spec: Obj, ranges: Any) -> list[FieldError]:
    found: list[FieldError] = []
    families, policy = spec.get("ipFamilies") or [], spec.get("ipFamilyPolicy")
    for number, (family, address) in enumerate(zip(families, spec.get("clusterIPs") or (), strict=False)):
        if address != "None" and (":" in address) is not (family == "IPv6"):
            why = f"expected an {family} value as indicated by `ipFamilies[{number}]`"
            found.append(invalid(f"spec.clusterIPs[{number}]", address, why))
    selectorless = spec.get("clusterIP") == "None" and not spec.get("selector")
    seen: set[str] = set()
    for number, one in enumerate(families):
        at = f"spec.ipFamilies[{number}]"
        if one not in {"IPv4", "IPv6"}:
            found.append(unsupported(at, one, ["IPv4", "IPv6"]))
        elif one in seen:
            found.append(FieldError("duplicate", at, "", one))
        elif one not in ranges.families and not selectorless and policy != "SingleStack":
            found.append(invalid(at, one, "not configured on this cluster"))
        seen.add(one)
    if policy is None and len(families) > 1 and len(ranges.families) < 2 and not selectorless:
        why = "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"
        return [invalid("spec.ipFamilyPolicy", "SingleStack", why)]
    if policy and policy not in POLICIES:
        found.append(unsupported("spec.ipFamilyPolicy", policy, POLICIES))
    elif policy == "RequireDualStack" and len(ranges.families) < 2 and not selectorless:
        why = "this cluster is not configured for dual-stack services"
        found.append(invalid("spec.ipFamilyPolicy", policy, why))
    elif policy == "SingleStack" and len(families) > 1 and len(seen) > 1:
        why = "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"
        found.append(invalid("spec.ipFamilyPolicy", policy, why))
    return found
