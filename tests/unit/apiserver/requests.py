"""Requests to the fake API server, with their headers."""

from __future__ import annotations

from typing import Any

from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.unit.apiserver.wire_client import Received, Sent, Stream, exchange, target

CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
AUTH = ("Authorization", f"Bearer {ADMIN_TOKEN}")


def configmap(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


async def get(server: ApiServer, path: str, **query: object) -> Received:
    answer = await exchange(f"http://127.0.0.1:{server.port}", Sent("GET", target(path, dict(query)), [AUTH]))
    assert answer is not None
    return answer


def watch(server: ApiServer, path: str, **query: object) -> Stream:
    sent = Sent("GET", target(path, {"watch": 1, **query}), [AUTH])
    return Stream(f"http://127.0.0.1:{server.port}", sent)


def definition() -> dict[str, Any]:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    names = {"plural": "things", "kind": "Thing"}
    spec = {"group": "example.io", "scope": "Cluster", "names": names, "versions": [version]}
    metadata = {"name": "things.example.io"}
    api = "apiextensions.k8s.io/v1"
    return {"apiVersion": api, "kind": "CustomResourceDefinition", "metadata": metadata, "spec": spec}
