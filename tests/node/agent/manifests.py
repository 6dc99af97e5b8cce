"""Writes manifests of pods, nodes and policies to a folder, and reads the agent's resulting state."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hive.client import ask
from hive.lab.agent_process import api_socket


def this_node(guarded: str) -> dict[str, Any]:
    metadata = {"name": socket.gethostname(), "labels": {"guarded": guarded}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


POLICY = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "server", "namespace": "default"},
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "server"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"app": "client"}}]}],
    },
}


def pod(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "labels": dict(labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "node"}}


def write(folder: Path, name: str, *objects: Mapping[str, Any]) -> None:
    """Replace a file atomically, as editors and mounted volumes do."""
    new = folder / f".{name}.new"
    new.write_text("---\n".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
    new.rename(folder / f"{name}.yaml")


def labels_of(pid: int, pod_name: str) -> set[str]:
    (found,) = (
        one["status"]["identity"]["labels"]
        for one in ask("/v1/endpoint", api_socket(pid))
        if one["status"]["external-identifiers"]["pod-name"] == f"default/{pod_name}"
    )
    return set(found)


def _enforcement(pid: int, pod_name: str) -> str:
    """Return the directions with enforced policy; nothing for an absent pod."""
    for one in ask("/v1/endpoint", api_socket(pid)):
        if one["status"]["external-identifiers"]["pod-name"] == f"default/{pod_name}":
            state: str = one["status"]["policy"]["realized"]["policy-enabled"]
            return state
    return ""
