"""Objects of a simulated cluster, as its API server stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.simulation import ClusterIP, Machine, Rule, RunningPod

Body = dict[str, Any]


def cilium_node(machine: Machine) -> Body:
    """Return a CiliumNode with its pod range, if it is known."""
    ipam = {"podCIDRs": [machine.range]} if machine.range else {}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNode",
        "metadata": {"name": machine.name},
        "spec": {"addresses": [{"type": "InternalIP", "ip": machine.ip}], "ipam": ipam},
    }


def node(name: str, ip: str = "") -> Body:
    """Return a Node as the kubelet registers it."""
    addresses = [{"type": "InternalIP", "address": ip}] if ip else []
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {},
        "status": {"addresses": addresses},
    }


def cilium_identity(number: int, workload: int) -> Body:
    """Return a CiliumIdentity in use: without the mark of garbage collection."""
    labels = {
        "k8s:app": f"workload-{workload}",
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name": "default",
        "k8s:io.cilium.k8s.policy.cluster": "default",
        "k8s:io.cilium.k8s.policy.serviceaccount": "default",
        "k8s:io.kubernetes.pod.namespace": "default",
    }
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumIdentity",
        "metadata": {"name": str(number), "labels": {}, "annotations": {}},
        "security-labels": labels,
    }


def cilium_endpoint(pod: RunningPod, identity: int, node_ip: str) -> Body:
    """Return a CiliumEndpoint as its node's agent writes it."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": pod.name, "namespace": "default"},
        "status": {
            "id": 1,
            "identity": {"id": identity},
            "networking": {"addressing": [{"ipv4": pod.ip}], "node": node_ip},
            "state": "ready",
        },
    }


def running(pod: RunningPod) -> Body:
    """Return a running Pod."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": "default",
            "labels": {"app": f"workload-{pod.workload}"},
        },
        "spec": {"nodeName": pod.machine, "containers": [{"name": "c", "image": "x"}]},
        "status": {"phase": "Running", "podIP": pod.ip},
    }


def cluster_ip(name: str, service: ClusterIP) -> Body:
    """Return a Service of one port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": service.ip,
            "clusterIPs": [service.ip],
            "ipFamilies": ["IPv4"],
            "ports": [{"name": "p", "port": service.port, "targetPort": service.target, "protocol": "TCP"}],
        },
    }


def endpoint_slice(name: str, number: int, port: int, pods: Sequence[RunningPod]) -> Body:
    """Return an EndpointSlice with a part of a Service's endpoints."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-{number}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "p", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [pod.ip], "conditions": {"ready": True}, "nodeName": pod.machine} for pod in pods
        ],
    }


def policy(name: str, rule: Rule) -> Body:
    """Return a CiliumNetworkPolicy of one rule."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": rule.selected}},
            "ingress": [
                {
                    "fromEndpoints": [{"matchLabels": {"app": f"workload-{rule.workload}"}}],
                    "toPorts": [{"ports": [{"port": str(rule.port), "protocol": "TCP"}]}],
                }
            ],
        },
    }
