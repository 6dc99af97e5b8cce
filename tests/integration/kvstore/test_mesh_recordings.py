"""Recordings of Cilium's remote cluster watchers, replayed on ours over a real etcd.

Events of nodes, addresses and identities are compared by the final state, since Cilium announces unchanged
nodes again after each connection. Services are compared elsewhere.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kvstore.meshed import Mesh, mesh, until
from tests.support.etcd import Etcd
from tests.support.recordings import recordings

pytestmark = pytest.mark.anyio

RECORDED = [
    found
    for path in sorted(recordings("clustermesh").glob("*.json"))
    if (found := json.loads(path.read_text(encoding="utf-8")))["kind"] == "remote_cluster"
]
OF_SERVICES = {"k8s_service", "k8s_service_delete", "k8s_endpointslice", "k8s_endpointslice_delete"}
COUNTED = {
    "num-nodes": "nodes",
    "num-shared-services": "services",
    "num-endpoints": "endpoints",
    "num-identities": "identities",
}


class Expected:
    """What the events so far leave."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.addresses: dict[str, dict[str, Any]] = {}
        self.labels: dict[int, list[str]] = {}

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "node_update":
                node = event["node"]
                self.nodes[f"{node['cluster']}/{node['name']}"] = node
            case "node_delete":
                del self.nodes[f"{event['cluster']}/{event['name']}"]
            case "ip_upsert":
                host = event["host_ip"]
                self.addresses[event["ip"]] = {
                    "identity": event["identity"],
                    "host_ip": "0.0.0.0" if host == "<nil>" else host,
                    "key": event["key"],
                }
            case "ip_delete":
                del self.addresses[event["ip"]]
            case "identity_add":
                self.labels[event["identity"]["id"]] = sorted(event["identity"]["labels"])
            case "identity_delete":
                del self.labels[event["identity"]["id"]]


def nodes_of(found: Mesh) -> dict[str, dict[str, Any]]:
    return {
        row.full_name: {
            "addresses": [f"{one.type}={one.ip}" for one in row.addresses],
            "boot_id": row.boot_id,
            "cluster": row.cluster,
            "encryption_key": row.encryption_key,
            "ipv4_alloc_cidr": str(row.ipv4_alloc_cidrs[0]),
            "ipv4_health_ip": str(row.health[0]),
            "name": row.name,
            "source": row.source.value,
            "wireguard_pub_key": row.wireguard_key,
        }
        for row in found.tables.nodes.all()
    }


async def act(found: Mesh, action: dict[str, Any]) -> None:
    match action["op"]:
        case "put":
            found.put(action["key"], action["json"] if "json" in action else action["value"])
        case "delete":
            found.etcd.delete(action["key"])
        case "connect":
            await found.connect(action["cluster"])
            if error := action.get("error"):
                text = error if "not JSON" in error or "invalid character" not in error else error[:40]
                await until(lambda: text in found.row(action["cluster"]).status)
            else:
                await until(lambda: config_of(found, action["cluster"]).get("retrieved"))
        case "disconnect":
            await found.disconnect(action["cluster"])
        case "remove_config":
            await found.remove(action["cluster"])
        case other:
            assert other in OF_SERVICES


def config_of(found: Mesh, cluster: str) -> dict[str, Any]:
    config = found.row(cluster).config
    return {"retrieved": config.retrieved} if config is not None else {}


def compared(found: Mesh, expected: Expected, clusters: list[dict[str, Any]]) -> bool:
    """True. Raise AssertionError unless all is as it was recorded."""
    known = {name: {**node} for name, node in expected.nodes.items()}
    for node in known.values():
        node.pop("cluster_id")
    assert nodes_of(found) == known
    assert found.addresses() == expected.addresses
    assert found.labels() == expected.labels
    for one in clusters:
        cluster = one["name"]
        row = found.row(cluster)
        assert found.counts(cluster) == {kind: one.get(name, 0) for name, kind in COUNTED.items()}
        assert dict.fromkeys(row.synced, True) == one["synced"]
        assert row.ready is one.get("ready", False)
    return True


@pytest.mark.parametrize("recorded", RECORDED, ids=[one["name"] for one in RECORDED])
async def test_a_remote_cluster_is_read_as_recorded(
    recorded: dict[str, Any], etcd: Etcd, tmp_path: Path
) -> None:
    expected = Expected()
    async with mesh(tmp_path, etcd) as found:
        for step in recorded["steps"]:
            for action in step["do"]:
                await act(found, action)
            for event in step["events"]:
                if not event["event"].startswith("service"):
                    expected.take(event)
            clusters = step["remote_clusters_after"]
            for one in clusters:
                await until(lambda one=one: set(found.row(one["name"]).synced) == set(one["synced"]))
                await found.caught_up(one["name"])
            await until(partial(compared, found, expected, clusters))
            assert {row.name for row in found.tables.clusters.all()} >= {one["name"] for one in clusters}
