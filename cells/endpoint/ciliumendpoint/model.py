"""What the CiliumEndpoint of a pod says.

For:    PodEndpoints and CiliumEndpointSync. Needs: Endpoint, Pod.
Gives:  PodEndpoint, pod_endpoint, body, owners, status, of_object, named_ports.
Source: Cilium 1.17, CiliumEndpoint: all but metadata is in its status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cells.cluster.nodes import ClusterNode
from cells.endpoint import Endpoint, State
from cells.ipam import Family
from cells.kubernetes import (
    CILIUM_ENDPOINTS,
    NODE_NAME,
    CiliumEndpoint,
    CiliumEndpointStatus,
    NamedPort,
    Pod,
    owner_of,
    said,
)
from cells.policy.maps import RealizedPolicy

SHOWN_AS_READY = frozenset(
    {
        State.RESTORING,
        State.WAITING_TO_REGENERATE,
        State.REGENERATING,
        State.READY,
        State.DISCONNECTING,
        State.DISCONNECTED,
    }
)
"""States that come and go with every build: telling each would be a write each."""


class PodEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``ciliumendpoint``: what the object of a pod is to say."""

    namespace: str
    name: str
    pod: str
    """The owner, with its UID; both are empty where the pod's object has none."""
    pod_uid: str
    node_name: str
    """The node whose agent writes it."""
    labels: Mapping[str, str]
    status: CiliumEndpointStatus

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def said(self) -> int:
        """All of it as a number, to compare with KnownEndpoint."""
        return said(self.labels, self.pod, self.pod_uid, self.node_name, self.status)


def pod_endpoint(
    endpoint: Endpoint, pod: Pod, policy: RealizedPolicy | None, node: ClusterNode | None
) -> PodEndpoint | None:
    """The object to write for an endpoint; None while it has no identity, or if it is not a pod."""
    if not endpoint.identity or pod.spec.host_network or node is None:
        return None
    name = endpoint.cep_name
    wire: dict[str, Any] = {
        "id": endpoint.id,
        "state": _state(endpoint),
        "identity": {"id": endpoint.identity, "labels": list(endpoint.labels)},
        "networking": {"addressing": [_addresses(endpoint)], "node": _node_ip(node)},
        "encryption": {"key": node.encryption_key},
        "external-identifiers": {
            "cni-attachment-id": endpoint.attachment_id,
            "container-id": endpoint.container_id,
            "k8s-namespace": endpoint.pod_namespace,
            "k8s-pod-name": endpoint.pod_name,
            "pod-name": endpoint.pod,
        },
    }
    if ports := sorted(named_ports(pod), key=lambda one: (one.name, one.port)):
        wire["named-ports"] = [msgspec.to_builtins(one) for one in ports]
    if policy is not None:
        wire["policy"] = {
            "ingress": _direction(enforced=policy.ingress_enforced),
            "egress": _direction(enforced=policy.egress_enforced),
        }
    return PodEndpoint(
        namespace=endpoint.pod_namespace,
        name=name,
        pod=endpoint.pod_name if pod.metadata.uid else "",
        pod_uid=pod.metadata.uid,
        node_name=node.name,
        labels=pod.labels,
        status=msgspec.convert(wire, CiliumEndpointStatus),
    )


def named_ports(pod: Pod) -> Iterator[NamedPort]:
    """The ports that a pod's containers name."""
    for port in pod.named_ports:
        yield NamedPort(name=port.name, port=port.container_port, protocol=port.protocol)


def body(wanted: PodEndpoint) -> dict[str, Any]:
    """The whole object, for who creates it; it goes with its pod."""
    return {
        "apiVersion": CILIUM_ENDPOINTS.api_version,
        "kind": CILIUM_ENDPOINTS.kind,
        "metadata": {
            "name": wanted.name,
            "namespace": wanted.namespace,
            "labels": dict(wanted.labels),
            "annotations": {NODE_NAME: wanted.node_name},
            "ownerReferences": owners(wanted),
        },
        "status": status(wanted),
    }


def owners(wanted: PodEndpoint) -> list[dict[str, Any]]:
    """The pod, if it has a UID: a static pod's call may come before its object."""
    if not wanted.pod_uid:
        return []
    return [{"apiVersion": "v1", "kind": "Pod", "name": wanted.pod, "uid": wanted.pod_uid}]


def status(wanted: PodEndpoint) -> dict[str, Any]:
    """The status as it is written; ``enforcing`` must be there, also when it is false."""
    wire: dict[str, Any] = msgspec.to_builtins(wanted.status)
    for direction in wire.get("policy", {}).values():
        direction.setdefault("enforcing", False)
    return wire


def of_object(row: CiliumEndpoint) -> PodEndpoint:
    """What an object says, to compare."""
    pod, pod_uid = owner_of(row)
    return PodEndpoint(
        namespace=row.namespace,
        name=row.name,
        pod=pod,
        pod_uid=pod_uid,
        node_name=row.annotations.get(NODE_NAME, ""),
        labels=row.labels,
        status=row.status,
    )


def _state(endpoint: Endpoint) -> str:
    return (State.READY if endpoint.state in SHOWN_AS_READY else endpoint.state).value


def _addresses(endpoint: Endpoint) -> dict[str, str]:
    return {f"ipv{ip.version}": str(ip) for ip in endpoint.addresses}


def _node_ip(node: ClusterNode) -> str:
    found = node.node_ip(Family.IPV4) or node.node_ip(Family.IPV6)
    return str(found) if found is not None else ""


def _direction(*, enforced: bool) -> dict[str, Any]:
    return {"enforcing": enforced, "state": "enforcing" if enforced else "non-enforcing"}
