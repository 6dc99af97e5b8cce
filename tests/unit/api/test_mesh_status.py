"""Remote clusters in the status, as Cilium's clients read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import structlog

from cells.api.operations.status import StatusFacts
from cells.api.operations.status_sections import cluster_mesh
from cells.clustermesh.tables import (
    MeshSettings,
    MeshTables,
    RemoteCluster,
    RemoteClusterConfig,
    RemoteService,
    mesh_services,
)
from cells.config import AgentConfig, AgentSettings
from lifecycle import Lifecycle, Tables
from lifecycle.testing import fake


def shown(mesh: MeshTables) -> Any:
    facts = fake(StatusFacts, cluster_mesh=None)
    cluster_mesh(mesh, mesh_services(mesh, Tables())).fill(facts)
    return msgspec.to_builtins(facts.cluster_mesh)


def mesh(cluster_id: int) -> MeshTables:
    settings = AgentSettings(cluster_name="home", cluster_id=cluster_id)
    agent = AgentConfig(settings, Lifecycle("test"), structlog.get_logger())
    return MeshTables(agent, MeshSettings(clustermesh_config=Path("/clusters")), Tables())


def service(cluster: str, *, shared: bool) -> RemoteService:
    return RemoteService(cluster=cluster, namespace="default", name="web", cluster_id=2, shared=shared)


def test_without_an_id_of_the_cluster_there_is_nothing() -> None:
    found = mesh(0)
    assert not found.enabled
    assert shown(found) is None


def test_each_cluster_is_shown_by_name_with_what_is_known_of_it() -> None:
    found = mesh(1)
    assert shown(found) == {}
    config = RemoteClusterConfig(retrieved=True, cluster_id=2, kvstoremesh=True, sync_canaries=True)
    everything = frozenset({"nodes", "services", "endpoints", "identities"})
    found.clusters.put(RemoteCluster(name="west", failures=2, last_failure=1.5))
    found.clusters.put(
        RemoteCluster(name="east", connected=True, status="etcd: fine", config=config, synced=everything)
    )
    found.services.put(service("east", shared=True))
    found.services.put(service("west", shared=False))
    never = "0001-01-01T00:00:00.000Z"
    waiting = "Waiting for initial connection to be established"
    assert shown(found) == {
        "clusters": [
            {
                "name": "east",
                "ready": True,
                "connected": True,
                "status": "etcd: fine",
                "config": {
                    "required": True,
                    "retrieved": True,
                    "cluster-id": 2,
                    "kvstoremesh": True,
                    "sync-canaries": True,
                },
                "num-shared-services": 1,
                "last-failure": never,
                "synced": dict.fromkeys(("nodes", "services", "endpoints", "identities"), True),
            },
            {
                "name": "west",
                "status": waiting,
                "num-shared-services": 1,
                "num-failures": 2,
                "last-failure": "1970-01-01T00:00:01.500Z",
                "synced": {},
            },
        ],
        "num-global-services": 1,
    }
