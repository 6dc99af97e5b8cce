"""Creates the EndpointSlices that Kubernetes' controller would create for a Service.

Used by the lab, which has no controller, and by folders of manifests that are not applied yet. Source:
discovery.k8s.io/v1 and the EndpointSlice controller: ports named by pods get separate slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any

Object = Mapping[str, Any]
Port = tuple[str, str, int]
"""Name, protocol and number."""

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
SERVICE_NAME = "kubernetes.io/service-name"
_FAMILIES = {4: "IPv4", 6: "IPv6"}


def endpoint_slices(service: Object, pods: Iterable[Object], manager: str) -> list[dict[str, Any]]:
    """Return the slices of a service, at least an empty one; none for a service without a selector."""
    spec = service.get("spec") or {}
    if not spec.get("selector") or spec.get("type") == "ExternalName":
        return []
    groups: dict[tuple[int, tuple[Port, ...]], list[dict[str, Any]]] = {}
    for pod in pods:
        if selects(service, pod):
            ports = tuple(_ports(spec, pod))
            for address in _addresses(spec, pod):
                version = ip_address(address).version
                groups.setdefault((version, ports), []).append(_endpoint(spec, pod, address))
    if not groups:
        groups[4, ()] = []
    return [
        _slice(service, manager, number, version, ports, endpoints)
        for number, ((version, ports), endpoints) in enumerate(sorted(groups.items(), key=lambda one: one[0]))
    ]


def selects(service: Object, pod: Object) -> bool:
    """Whether a service selects the pod, and it has not terminated."""
    if namespace_of(service) != namespace_of(pod):
        return False
    if (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}:
        return False
    labels = pod["metadata"].get("labels") or {}
    wanted = (service.get("spec") or {}).get("selector") or {}
    return bool(wanted) and all(labels.get(key) == value for key, value in wanted.items())


def namespace_of(object_: Object) -> str:
    """Return the namespace of an object."""
    return object_["metadata"].get("namespace") or "default"


def _addresses(spec: Object, pod: Object) -> Iterator[str]:
    """Return the pod's addresses of the service's families."""
    status = pod.get("status") or {}
    found = [one["ip"] for one in status.get("podIPs") or ()] or [status.get("podIP")]
    served = spec.get("clusterIPs") or [spec.get("clusterIP")]
    versions = {ip_address(one).version for one in served if one and one != "None"}
    for address in found:
        if address and (not versions or ip_address(address).version in versions):
            yield address


def _ports(spec: Object, pod: Object) -> Iterator[Port]:
    """Return the service's ports on this pod, without named ports that it lacks."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    named = {
        (port["name"], port.get("protocol") or "TCP"): port["containerPort"]
        for container in containers
        for port in container.get("ports") or ()
        if port.get("name")
    }
    for port in spec.get("ports") or ():
        protocol = port.get("protocol") or "TCP"
        target = port.get("targetPort") or port["port"]
        number = named.get((target, protocol)) if isinstance(target, str) else target
        if number is not None:
            yield port.get("name") or "", protocol, number


def _endpoint(spec: Object, pod: Object, address: str) -> dict[str, Any]:
    conditions = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready", "True") == "True" or bool(spec.get("publishNotReadyAddresses"))
    found: dict[str, Any] = {"addresses": [address], "conditions": {"ready": ready}}
    if node := (pod.get("spec") or {}).get("nodeName"):
        found["nodeName"] = node
    target = {"kind": "Pod", "namespace": namespace_of(pod), "name": pod["metadata"]["name"]}
    return found | {"targetRef": target}


def _slice(
    service: Object,
    manager: str,
    number: int,
    version: int,
    ports: tuple[Port, ...],
    endpoints: list[dict[str, Any]],
) -> dict[str, Any]:
    name = service["metadata"]["name"]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-{number}",
            "namespace": namespace_of(service),
            "labels": {SERVICE_NAME: name, MANAGED_BY: manager},
        },
        "addressType": _FAMILIES[version],
        "ports": [{"name": name, "protocol": protocol, "port": port} for name, protocol, port in ports],
        "endpoints": endpoints,
    }
