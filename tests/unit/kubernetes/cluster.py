"""A fake API server, and hives that follow it as an agent does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.unit.apiserver.replay import RECORDINGS

Body = dict[str, Any]


def kubeconfig(folder: Path, url: str, token: str = ADMIN_TOKEN) -> str:
    """Write a kubeconfig for the server at ``url``, of an administrator or of the token's user."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


class Cluster:
    """Writes objects of the fake server as another client, without validation."""

    def __init__(self, server: ApiServer, url: str) -> None:
        self.server = server
        self.url = url

    def put(self, obj: Body) -> None:
        """Create or change an object."""
        storage, key = self._where(obj)
        live = self.server.store.get(storage, key) or {}
        unique = {"resourceVersion": "1", "uid": f"uid-{key[1]}"}
        metadata = unique | live.get("metadata", {}) | obj["metadata"]
        self.server.store.put(storage, key, {**live, **obj, "metadata": metadata})

    def get(self, kind: str, name: str, namespace: str = "") -> Body | None:
        """Return an object."""
        storage, key = self._where(_stub(kind, name, namespace))
        return self.server.store.get(storage, key)

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete an object."""
        storage, key = self._where(_stub(kind, name, namespace))
        self.server.store.delete(storage, key)

    def serves(self, plural: str) -> bool:
        """Return whether a custom resource is established."""
        return any(
            self.server.kinds.get("cilium.io", version, plural) is not None for version in ("v2", "v2alpha1")
        )

    def _where(self, obj: Body) -> tuple[Any, tuple[str, str]]:
        group, _, version = obj["apiVersion"].rpartition("/")
        plural = PLURALS.get(obj["kind"], obj["kind"].lower() + "s")
        kind = self.server.kinds.get(group, version, plural)
        assert kind is not None, obj["kind"]
        return kind.storage, (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "CiliumIdentity": "ciliumidentities",
    "CiliumNetworkPolicy": "ciliumnetworkpolicies",
    "CiliumClusterwideNetworkPolicy": "ciliumclusterwidenetworkpolicies",
}
CILIUM = [one for one in PLURALS if one.startswith("Cilium")]
VERSIONS = dict.fromkeys([*CILIUM, "CiliumEndpoint", "CiliumNode"], "cilium.io/v2") | {
    "EndpointSlice": "discovery.k8s.io/v1"
}


def _stub(kind: str, name: str, namespace: str) -> Body:
    version = VERSIONS.get(kind, "v1")
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}}


def pod(name: str, node: str = "node1", **labels: str) -> Body:
    """Return a pod of a node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "nodeName": node,
            "serviceAccountName": "default",
            "containers": [{"name": "c", "image": "x"}],
        },
    }


def namespace(name: str, **labels: str) -> Body:
    """Return a namespace."""
    labels["kubernetes.io/metadata.name"] = name
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@asynccontextmanager
async def cluster(*definitions: str, port: int = 0) -> AsyncIterator[Cluster]:
    """Return a fake server with custom resources by their plural names."""
    server = ApiServer()
    server.future_wait = 0.2
    for one in definitions:
        server.add(json.loads((RECORDINGS / "fixtures" / f"crd_{one}.json").read_bytes()))
    async with server.serving(port=port) as url:
        found = Cluster(server, url)
        await eventually(lambda: all(found.serves(one) for one in definitions))
        server.definitions.fresh.clear()  # its storage is ready at once
        found.put(namespace("default"))
        yield found
