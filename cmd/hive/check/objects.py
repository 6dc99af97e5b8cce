"""The objects of checks: a namespace, pods, services, policies; all have a label of checks.

Source: Pod Security Standards: pods comply with "restricted", except those in the host network, for which the
namespace is labelled "privileged".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

Object = dict[str, Any]
NAMESPACE: Final = "hive-check"
LABEL: Final = "hive-check"
"""Label of all objects of a check; its value is the role."""
RUN: Final = "hive-check-run"
OPEN, SHUT = 18470, 18471
"""Ports of the servers: one that policies allow, one that they do not."""
HOST_PORT: Final = 18472
"""Port of the server in a node's network."""
SERVICE_PORT: Final = 80
ROLES: Final = ("client", "server", "host")
_LONGEST: Final = 63


def name_of(role: str, node: str) -> str:
    """Return a pod's name: role and node name, shortened to the 63 characters of a label."""
    name = f"{role}-{node.replace('.', '-').lower()}"
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"


def server_name(node: str) -> str:
    """Return the name of a node's server pod, and of its service."""
    return name_of("server", node)


def namespace_object(name: str, run: str = "") -> Object:
    """Return the namespace of a check; ``run`` identifies the run that created it."""
    labels = {LABEL: "namespace", "pod-security.kubernetes.io/enforce": "privileged"}
    labels |= {RUN: run} if run else {}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def pod_object(role: str, node: str, namespace: str, image: str, ports: Sequence[int]) -> Object:
    """Return a pod bound to a node without the scheduler, so that it also runs on cordoned nodes."""
    name = name_of(role, node)
    listening = [argument for port in ports for argument in ("--port", str(port))]
    security: Object = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "probe",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["hive", "probe", "serve", "--name", name, *listening],
        "securityContext": security,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL: role, f"{LABEL}-pod": name}},
        "spec": {
            "nodeName": node,
            "hostNetwork": role == "host",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
        },
    }


def service_object(node: str, namespace: str) -> Object:
    """Return the service of a node's server, with a node port."""
    name = server_name(node)
    port = {"name": "open", "port": SERVICE_PORT, "targetPort": OPEN, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL: "service"}},
        "spec": {
            "type": "NodePort",
            "ipFamilyPolicy": "PreferDualStack",
            "selector": {f"{LABEL}-pod": name},
            "ports": [port],
        },
    }


def policies(kind: str, direction: str, namespace: str) -> list[Object]:
    """Return policies that allow one port from clients to servers, and nothing else in this direction."""
    client, server = {"matchLabels": {LABEL: "client"}}, {"matchLabels": {LABEL: "server"}}
    subject, peer = (server, client) if direction == "ingress" else (client, server)
    metadata = {"name": f"check-{direction}", "namespace": namespace, "labels": {LABEL: "policy"}}
    spec: Mapping[str, Any]
    if kind == "NetworkPolicy":
        ports = [{"port": OPEN, "protocol": "TCP"}]
        rule = {"from" if direction == "ingress" else "to": [{"podSelector": peer}], "ports": ports}
        spec = {"podSelector": subject, "policyTypes": [direction.capitalize()], direction: [rule]}
        return [
            {"apiVersion": "networking.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": dict(spec)}
        ]
    to_ports = [{"ports": [{"port": str(OPEN), "protocol": "TCP"}]}]
    key = "fromEndpoints" if direction == "ingress" else "toEndpoints"
    spec = {"endpointSelector": subject, direction: [{key: [peer], "toPorts": to_ports}]}
    return [{"apiVersion": "cilium.io/v2", "kind": kind, "metadata": metadata, "spec": dict(spec)}]
