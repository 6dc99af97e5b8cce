"""Which addresses of nodes a service gets.

Needs: Node, EndpointSlice, ClusterService.   Gives: Place, place_of(), ready_nodes(), addresses_for().
Source: Cilium 1.17, node IPAM; KEP-3458 for the nodes that load balancers leave out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import Final

import msgspec

from cells.kubernetes import EndpointSlice, Node
from cells.operator.objects import ClusterService, selector_of

EXCLUDED: Final = "node.kubernetes.io/exclude-from-external-load-balancers"
GOING: Final = "ToBeDeletedByClusterAutoscaler"
MATCH: Final = "io.cilium.nodeipam/match-node-labels"
FAMILIES: Final = {"IPv4": 4, "IPv6": 6}


class Place(msgspec.Struct, frozen=True, gc=False):
    """A node that traffic from outside may come by."""

    name: str
    labels: dict[str, str]
    external: tuple[str, ...]
    internal: tuple[str, ...]


def place_of(node: Node) -> Place | None:
    """The node as a place; None for one that is left out, or is going."""
    tainted = any(one.key == GOING for one in node.spec.taints or ())
    if node.terminating or EXCLUDED in node.labels or tainted:
        return None
    found: dict[str, list[str]] = {"ExternalIP": [], "InternalIP": []}
    for one in node.status.addresses or ():
        if one.type in found and _version(one.address):
            found[one.type].append(one.address)
    return Place(node.name, dict(node.labels), tuple(found["ExternalIP"]), tuple(found["InternalIP"]))


def ready_nodes(slices: Iterable[EndpointSlice]) -> set[str]:
    """The nodes with a backend that is ready; without a word it counts as ready."""
    return {
        one.node_name
        for each in slices
        for one in each.endpoints or ()
        if one.node_name and one.conditions.ready is not False
    }


def addresses_for(
    service: ClusterService, places: Collection[Place], slices: Iterable[EndpointSlice]
) -> tuple[str, ...]:
    """External addresses of its nodes, or else internal ones, in order. Raises ValueError.

    With ``externalTrafficPolicy: Local`` its nodes are those with a backend that is ready.
    """
    text = service.annotations.get(MATCH, "")
    try:
        selector = selector_of(text)
    except ValueError as error:
        raise ValueError(f"{MATCH}={text}: {error}") from error
    chosen = [one for one in places if selector.matches(one.labels)]
    if service.spec.external_traffic_policy == "Local":
        ready = ready_nodes(slices)
        chosen = [one for one in chosen if one.name in ready]
    versions = {FAMILIES.get(one) for one in service.spec.ip_families or ("IPv4",)}
    external = {ip for one in chosen for ip in one.external if _version(ip) in versions}
    internal = {ip for one in chosen for ip in one.internal if _version(ip) in versions}
    return tuple(sorted(external or internal))


def _version(text: str) -> int | None:
    try:
        return ip_address(text).version
    except ValueError:
        return None
