"""Services: their addresses, families and ports; and what is free of each."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    duplicate,
    forbidden,
    internal,
    invalid,
    required,
    unprocessable,
)
from tests.support.apiserver.kinds import Strategy, selectable
from tests.support.apiserver.rules import changed, cidr_problem, label_problem, subdomain_problem
from tests.support.apiserver.valid import label_errors

IPV4 = ipaddress.ip_network("10.96.0.0/16")
IPV6 = ipaddress.ip_network("fd00:10:96::/112")
FIRST_NODE_PORT, LAST_NODE_PORT = 30000, 32767


class Ranges:
    """What services are given."""

    def __init__(self, *, dual_stack: bool) -> None:
        self.families = ("IPv4", "IPv6") if dual_stack else ("IPv4",)
        self._addresses: set[str] = set()
        self._ports: set[int] = set()
        self._next = {"IPv4": 256, "IPv6": 256}
        self._next_port = FIRST_NODE_PORT + 100

    def network(self, family: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """The range of a family."""
        return IPV4 if family == "IPv4" else IPV6

    def address(self, family: str) -> str:
        """A free address, taken."""
        network = self.network(family)
        while True:
            self._next[family] += 1
            found = str(network[self._next[family]])
            if found not in self._addresses:
                self._addresses.add(found)
                return found

    def take(self, address: str) -> str:
        """Take this address; why it cannot be had, or nothing."""
        wanted = ipaddress.ip_address(address)
        network = self.network(f"IPv{wanted.version}")
        if wanted not in network:
            return (
                f"the provided IP ({address}) is not in the valid range. The range of valid IPs is {network}"
            )
        if address in self._addresses:
            return "provided IP is already allocated"
        self._addresses.add(address)
        return ""

    def port(self) -> int:
        """A free node port, taken."""
        while self._next_port in self._ports:
            self._next_port += 1
        self._ports.add(self._next_port)
        return self._next_port

    def take_port(self, port: int) -> str:
        """Take this port; why it cannot be had, or nothing."""
        if not FIRST_NODE_PORT <= port <= LAST_NODE_PORT:
            valid = f"{FIRST_NODE_PORT}-{LAST_NODE_PORT}"
            return f"provided port is not in the valid range. The range of valid ports is {valid}"
        if port in self._ports:
            return "provided port is already allocated"
        self._ports.add(port)
        return ""

    def release(self, service: Obj) -> None:
        """What a service had is free again."""
        spec = service.get("spec") or {}
        self._addresses -= set(spec.get("clusterIPs") or ())
        self._ports -= {one["nodePort"] for one in spec.get("ports") or () if one.get("nodePort")}
        if spec.get("healthCheckNodePort"):
            self._ports.discard(spec["healthCheckNodePort"])

    def bootstrap(self, server: Any) -> None:
        """The service ``kubernetes`` with its EndpointSlice."""
        labels = {"component": "apiserver", "provider": "kubernetes"}
        ports = [{"name": "https", "port": 443, "targetPort": 6443}]
        server.add(
            {
                "kind": "Service",
                "apiVersion": "v1",
                "metadata": {"name": "kubernetes", "labels": labels},
                "spec": {"ports": ports, "clusterIP": str(IPV4[1])},
            }
        )
        server.add(
            {
                "kind": "EndpointSlice",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": ["192.0.2.10"], "conditions": {"ready": True}}],
                "ports": [{"name": "https", "port": 6443, "protocol": "TCP"}],
            }
        )


DUAL = {"PreferDualStack", "RequireDualStack"}


class Services(Strategy):
    """Given addresses and node ports when they are stored."""

    empty: ClassVar[Obj] = {"spec": {}, "status": {"loadBalancer": {}}}
    answers_object = True
    create_on_update = True
    fields: ClassVar[Mapping[str, str]] = selectable(
        "metadata.name", "metadata.namespace", "spec.clusterIP", "spec.type"
    )

    def name_problem(self, name: str) -> str:
        return label_problem(name)

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
        spec = obj["spec"]
        found = label_errors(spec.get("selector") or {}, "spec.selector")
        found += [*_port_errors(spec), *_type_errors(spec), *_family_errors(spec, server.ranges)]
        for number, one in enumerate(spec.get("loadBalancerSourceRanges") or ()):
            if problem := cidr_problem(one.strip(), strict=False):
                found.append(invalid(f"spec.LoadBalancerSourceRanges[{number}]", one, problem))
        return found

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
    raise unprocessable("", "Service", obj["metadata"]["name"], [invalid(at, value, why)])


def _port_errors(spec: Obj) -> Iterator[FieldError]:
    ports = spec.get("ports") or []
    if not ports and spec["type"] != "ExternalName" and spec.get("clusterIP") != "None":
        yield required("spec.ports")
    seen: set[tuple[Any, Any]] = set()
    outside: set[tuple[Any, Any]] = set()
    for number, port in enumerate(ports):
        at = f"spec.ports[{number}]"
        if len(ports) > 1 and not port.get("name"):
            yield required(f"{at}.name")
        if (key := (port.get("port"), port.get("protocol"))) in seen:
            yield duplicate(at, port)
        seen.add(key)
        if not (node_port := port.get("nodePort")):
            continue
        if spec["type"] == "ClusterIP":
            yield forbidden(f"{at}.nodePort", "may not be used when `type` is 'ClusterIP'")
        if (key := (node_port, port.get("protocol"))) in outside:
            yield duplicate(f"{at}.nodePort", node_port)
        outside.add(key)


def _type_errors(spec: Obj) -> Iterator[FieldError]:
    kind, policy = spec["type"], spec.get("externalTrafficPolicy")
    external = kind in {"NodePort", "LoadBalancer"}
    if kind == "ExternalName":
        if spec.get("clusterIP") or spec.get("clusterIPs"):
            yield forbidden("spec.clusterIPs", "may not be set for ExternalName services")
        name = spec.get("externalName", "").rstrip(".")
        if not name:
            yield required("spec.externalName")
        elif problem := subdomain_problem(name):
            yield invalid("spec.externalName", spec["externalName"], problem)
    if spec.get("clusterIP") == "None" and external:
        yield invalid("spec.clusterIPs[0]", "None", f"may not be set to 'None' for {kind} services")
    if (addresses := spec.get("clusterIPs")) and not spec.get("clusterIP"):
        yield invalid("spec.clusterIPs", addresses, "must be empty when `clusterIP` is not specified")
    if spec.get("loadBalancerClass") and kind != "LoadBalancer":
        yield forbidden("spec.loadBalancerClass", "may only be used when `type` is 'LoadBalancer'")
    if spec.get("loadBalancerSourceRanges") and kind != "LoadBalancer":
        yield forbidden("spec.LoadBalancerSourceRanges", "may only be used when `type` is 'LoadBalancer'")
    if policy and not (external or spec.get("externalIPs")):
        why = "may only be set for externally-accessible services"
        yield invalid("spec.externalTrafficPolicy", policy, why)
    if (port := spec.get("healthCheckNodePort")) and (kind, policy) != ("LoadBalancer", "Local"):
        why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        yield invalid("spec.healthCheckNodePort", port, why)


def _family_errors(spec: Obj, ranges: Any) -> Iterator[FieldError]:
    families, policy = spec.get("ipFamilies") or [], spec.get("ipFamilyPolicy")
    for number, (family, address) in enumerate(zip(families, spec.get("clusterIPs") or (), strict=False)):
        if address != "None" and (":" in address) is not (family == "IPv6"):
            yield invalid(f"spec.clusterIPs[{number}]", address, f"expected an {family} value")
    selectorless = spec.get("clusterIP") == "None" and not spec.get("selector")
    single = len(ranges.families) < 2 and not selectorless
    several = "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"
    if policy is None and len(families) > 1 and single:
        yield invalid("spec.ipFamilyPolicy", "SingleStack", several)
        return
    for number, one in enumerate(families):
        known = one in ranges.families or one not in {"IPv4", "IPv6"} or one in families[:number]
        if not known and not selectorless and policy != "SingleStack":
            yield invalid(f"spec.ipFamilies[{number}]", one, "not configured on this cluster")
    if policy == "RequireDualStack" and single:
        yield invalid("spec.ipFamilyPolicy", policy, "this cluster is not configured for dual-stack services")
    elif policy == "SingleStack" and len(set(families)) > 1:
        yield invalid("spec.ipFamilyPolicy", policy, several)
