"""The fake API server with a big cluster in it; on SIGUSR1 every CiliumEndpoint changes.

``python -m tests.bench.tools.object_server PODS NODES ENDPOINTS [CILIUM_NODES IDENTITIES
SERVICES]`` prints its address, and what rounds took. Identities are marked as unused since long.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any

from lifecycle.testing import eventually
from tests.bench.service_events import service, slice_of
from tests.bench.service_rules import ServiceLoad
from tests.support.apiserver import ApiServer
from tests.unit.apiserver.replay import RECORDINGS

NODE = "node-0"
DEFINITIONS = ("ciliumendpoints", "ciliumidentities", "ciliumnodes")


def pod(number: int) -> dict[str, Any]:
    """Return a Pod of the size that real clusters have: some 2.5 KB."""
    labels = {"app": f"app-{number % 100}", "pod-template-hash": f"{number % 500:010x}", "tier": "backend"}
    probe = {"httpGet": {"path": "/healthz", "port": 8080, "scheme": "HTTP"}, "periodSeconds": 10}
    container = {
        "name": "main",
        "image": "registry.example.org/team/app:1.2.3",
        "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
        "env": [{"name": f"SETTING_{one}", "value": f"value-{one}"} for one in range(8)],
        "resources": {
            "limits": {"cpu": "1", "memory": "1Gi"},
            "requests": {"cpu": "100m", "memory": "128Mi"},
        },
        "livenessProbe": probe,
        "readinessProbe": probe,
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
    }
    ip = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [
        {"type": one, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for one in kinds
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"pod-{number:06d}", "namespace": "default", "labels": labels},
        "spec": {
            "nodeName": NODE,
            "serviceAccountName": "default",
            "containers": [container],
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}
            ],
        },
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions},
    }


def node(number: int) -> dict[str, Any]:
    """Return a Node, some 1 KB."""
    address = f"192.168.{number >> 8}.{number & 255}"
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"node-{number}", "labels": {"kubernetes.io/hostname": f"node-{number}"}},
        "spec": {
            "podCIDR": f"10.{number >> 8}.{number & 255}.0/24",
            "podCIDRs": [f"10.{number & 255}.0.0/24"],
        },
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}],
            "capacity": {"cpu": "8", "memory": "32Gi", "pods": "110"},
            "conditions": [{"type": one, "status": "False", "message": "kubelet is fine"} for one in kinds],
        },
    }


def endpoint(number: int, turn: int) -> dict[str, Any]:
    """Return a CiliumEndpoint of a remote pod."""
    ip = f"10.{64 + (number >> 16 & 63)}.{number >> 8 & 255}.{number & 255}"
    networking = {"addressing": [{"ipv4": ip}], "node": f"192.168.1.{number % 250}"}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": f"pod-{number:06d}", "namespace": "default"},
        "status": {"id": number, "identity": {"id": 300 + (number + turn) % 200}, "networking": networking},
    }


def cilium_node(number: int) -> dict[str, Any]:
    """Return a CiliumNode as its agent creates it: without ranges."""
    address = {"type": "InternalIP", "ip": f"192.168.{number >> 8}.{number & 255}"}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNode",
        "metadata": {"name": f"node-{number:05d}", "uid": f"u-{number}", "labels": {"team": "a"}},
        "spec": {"addresses": [address], "ipam": {}},
    }


def identity(number: int) -> dict[str, Any]:
    """Return an identity that was marked years ago."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumIdentity",
        "metadata": {
            "name": str(256 + number),
            "uid": f"u-{number}",
            "annotations": {"io.cilium.heartbeat": "2020-01-01T00:00:00Z"},
        },
        "security-labels": {"k8s:app": f"app-{number}", "k8s:io.kubernetes.pod.namespace": "default"},
    }


def put_services(server: ApiServer, count: int) -> None:
    """Create services of BACKENDS backends, each with one slice."""
    load = ServiceLoad(count)
    for number in range(count):
        backends = load.backends(number)
        slice_ = slice_of(number, [ip for ip, _ in backends], backends[0][1])
        for group, version, plural, body in (
            ("", "v1", "services", service(number)),
            ("discovery.k8s.io", "v1", "endpointslices", slice_),
        ):
            found = server.kinds.get(group, version, plural)
            assert found is not None
            body["metadata"] |= {"uid": f"{plural}-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"}
            server.store.put(found.storage, (body["metadata"]["namespace"], body["metadata"]["name"]), body)


async def serve(
    pods: int, nodes: int, endpoints: int, cilium_nodes: int = 0, identities: int = 0, services: int = 0
) -> None:
    """Serve until the process is ended."""
    server = ApiServer()
    for one in DEFINITIONS:
        server.add(json.loads((RECORDINGS / "fixtures" / f"crd_{one}.json").read_bytes()))
    async with server.serving() as url:
        await eventually(lambda: server.kinds.get("cilium.io", "v2", "ciliumnodes"))
        server.definitions.fresh.clear()
        objects: list[dict[str, Any]] = [*map(node, range(nodes)), *map(pod, range(pods))]
        for number, obj in enumerate(objects):
            found = server.kinds.get("", "v1", obj["kind"].lower() + "s")
            assert found is not None
            obj["metadata"] |= {"uid": f"u-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"}
            server.store.put(
                found.storage, (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]), obj
            )
        for plural, made in (
            ("ciliumnodes", map(cilium_node, range(cilium_nodes))),
            ("ciliumidentities", map(identity, range(identities))),
        ):
            found = server.kinds.get("cilium.io", "v2", plural)
            assert found is not None
            for body in made:
                server.store.put(found.storage, ("", body["metadata"]["name"]), body)
        put_services(server, services)
        kind = server.kinds.get("cilium.io", "v2", "ciliumendpoints")
        assert kind is not None
        turns = 0

        def put() -> None:
            nonlocal turns
            began, turns = time.monotonic(), turns + 1
            for number in range(endpoints):
                body = endpoint(number, turns)
                key = (body["metadata"]["namespace"], body["metadata"]["name"])
                live = server.store.get(kind.storage, key) or {}
                body["metadata"] = {**live.get("metadata", {"uid": f"u{number}"}), **body["metadata"]}
                server.store.put(kind.storage, key, body)
            print(json.dumps({"turn": turns, "seconds": time.monotonic() - began}), flush=True)  # noqa: T201

        put()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, put)
        print(json.dumps({"url": url}), flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
