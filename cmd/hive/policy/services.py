"""Finds parts of a folder's Services, EndpointSlices and local redirect policies that are not served.

The agent's own code processes them, with the folder as the whole cluster; findings are what it would log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cells.cluster.nodes.parse import ParsedNode, parse_cilium_node, parse_node
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.cilium_policy import CILIUM_LOCAL_REDIRECT_POLICIES
from cells.kubernetes.objects.core import ENDPOINT_SLICES, NODES, PODS, SERVICES, EndpointSlice
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.resources import INDEXES
from cells.policy.explain.check import Finding
from cells.policy.explain.cluster import Cluster, Located
from cells.services import LoadBalancerOptions, ServiceName, ServingNode, parse_address
from cells.services.model import ServiceCatalog
from cells.services.model.backends import refused_backends
from cells.services.model.claims import (
    EXTERNAL_IPS,
    INGRESS,
    frontends,
    node_reservations,
    pod_reservations,
    unsupported_parts,
)
from cells.services.model.frontends import faults_of
from cells.services.model.redirect import read_redirect
from lifecycle import Table

OPTIONS = LoadBalancerOptions(enable_sctp=True, enable_local_redirect_policy=True)


def service_findings(cluster: Cluster) -> list[Finding]:
    """Yield refused parts (error) and parts without effect (warning), by place."""
    catalog = _catalog(cluster)
    of_slices = [
        Finding(at.at("endpoints"), "error", f"{row.namespace}/{row.name}: {ip} is not a backend's address")
        for at, row in _rows(cluster, ENDPOINT_SLICES)
        for ip in refused_backends(row)
    ]
    return sorted({*of_slices, *_services(cluster, catalog), *_redirects(cluster, catalog)})


def _catalog(cluster: Cluster) -> ServiceCatalog:
    """Return the services with nodes and pods, the addresses of which services must not have."""
    slices: Table[tuple[str, str], EndpointSlice] = Table(
        "slices", key=lambda one: one.key, indexes=INDEXES[ENDPOINT_SLICES.qualified]
    )
    catalog = ServiceCatalog(OPTIONS, ServingNode(""), slices, frontends())
    for _, node in _rows(cluster, NODES):
        _reserve_node(catalog, f"Node {node.name}", node.name, parse_node(node))
    for _, node in _rows(cluster, CILIUM_NODES):
        _reserve_node(catalog, f"CiliumNode {node.name}", node.name, parse_cilium_node(node))
    for _, pod in _rows(cluster, PODS):
        catalog.reserve(f"pod {pod.namespace}/{pod.name}", pod_reservations(pod))
    for _, service in _rows(cluster, SERVICES):
        catalog.upsert_service(service)
    for _, slice_ in _rows(cluster, ENDPOINT_SLICES):
        slices.put(slice_)
        catalog.slices_changed(ServiceName(slice_.namespace, slice_.service))
    return catalog


def _reserve_node(catalog: ServiceCatalog, object_name: str, name: str, node: ParsedNode) -> None:
    ranges = [cidr for cidrs in node.cidrs.values() for cidr in cidrs]
    catalog.reserve(object_name, node_reservations(name, node.addresses, ranges))


def _services(cluster: Cluster, catalog: ServiceCatalog) -> Iterator[Finding]:
    for at, row in _rows(cluster, SERVICES):
        name = ServiceName(row.namespace, row.name)
        for part, reason in unsupported_parts(row, OPTIONS):
            yield Finding(at.at(_path(at, part)), "warning", f"{name}: {part}: {reason}")
        for annotation, reason in faults_of(row, OPTIONS):
            place = at.at(f"metadata.annotations.{annotation}")
            yield Finding(place, "warning", f"{name}: {annotation} has no effect: {reason}")
        for one in catalog.refused.get(name, ()):
            place = at.at(_place_of(at, one.part, str(one.address)))
            yield Finding(place, "error", f"{name}: {one.part}: {one.address} {one.reason}: not served")


def _redirects(cluster: Cluster, catalog: ServiceCatalog) -> Iterator[Finding]:
    for at, row in _rows(cluster, CILIUM_LOCAL_REDIRECT_POLICIES):
        name = ServiceName(row.namespace, row.name)
        try:
            catalog.upsert_redirect(read_redirect(row))
        except ValueError as error:
            yield Finding(at.at("spec"), "error", f"{name}: {error}")
        if reason := catalog.refused_redirects.get(name):
            place = at.at("spec.redirectFrontend.addressMatcher.ip")
            yield Finding(place, "error", f"{name}: {reason}: not redirected")


def _rows(cluster: Cluster, kind: Kind[Any]) -> Iterator[tuple[Located, Any]]:
    for located in cluster.located(kind.kind):
        metadata = located.object["metadata"]
        if kind.namespaced and not metadata.get("namespace"):
            metadata = {**metadata, "namespace": "default"}
        yield located, kind.convert({**located.object, "metadata": metadata})


def _path(at: Located, part: str) -> str:
    """Return the field of a part of a spec: ``port 80`` belongs to the list ``ports``."""
    number = part.partition(" ")[2]
    if not number:
        return f"spec.{part}"
    ports = at.object["spec"].get("ports") or ()
    return next((f"spec.ports[{i}]" for i, one in enumerate(ports) if str(one.get("port")) == number), "spec")


def _place_of(at: Located, part: str, address: str) -> str:
    lists: Mapping[str, Any] = {
        EXTERNAL_IPS: ("spec.externalIPs", (at.object.get("spec") or {}).get("externalIPs") or ()),
        INGRESS: (f"{INGRESS}", [one.get("ip") for one in _ingress(at.object)]),
    }
    path, texts = lists[part]
    found = next((i for i, text in enumerate(texts) if str(parse_address(str(text))) == address), None)
    return path if found is None else f"{path}[{found}]"


def _ingress(service: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
