"""Identities in both stores, so that a cluster can migrate while its pods run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
import structlog

from cells import kubernetes, kvstore
from cells.base.addresses import Family
from cells.cluster import allocation, identity
from cells.cluster.allocation.keys import SharedIdentities
from cells.cluster.allocation.objects import body
from cells.cluster.identity.identities import Identities
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes.objects.cilium_endpoint import CiliumIdentity
from cells.node.addresses import NodeAddress, Origin, address_table
from lifecycle import HealthTree, Hive, Lifecycle, StartError, Table, invoke, provide, supply
from tests.integration.kvstore.agreeing import STATE, keys, until
from tests.support.etcd import Etcd
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig

pytestmark = pytest.mark.anyio

WEB = ("k8s:app=web", "k8s:io.kubernetes.pod.namespace=default")
DB = ("k8s:app=db", "k8s:io.kubernetes.pod.namespace=default")
READ_KEYS, READ_OBJECTS = "doublewrite-readkvstore", "doublewrite-readcrd"


class Agent:
    def __init__(self, hive: Hive) -> None:
        self.identities = hive.get(Identities)
        self._health = hive.get(HealthTree)
        self._objects = hive.get(Table[tuple[str, str], CiliumIdentity])
        self._keys = hive.get(SharedIdentities).table

    def sees(self, number: int) -> bool:
        """Whether it has heard of the object and of the key."""
        return self.sees_key(number) and ("", str(number)) in self._objects

    def sees_key(self, number: int) -> bool:
        return str(number) in self._keys

    def trouble(self) -> str:
        return " ".join(one.message or "" for one in self._health.snapshot() if one.level == "degraded")


@asynccontextmanager
async def agent(etcd: Etcd, folder: Path, server: Cluster | None, mode: str) -> AsyncIterator[Agent]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    parts = (kubernetes.cell, kvstore.cell, identity.cell, allocation.cell, provide(address_table))
    settings = {
        "kvstore": "etcd",
        "kvstore-opt": f"etcd.address={etcd.url}",
        "identity-allocation-mode": mode,
    }
    if server is not None:
        settings |= {"k8s-kubeconfig-path": kubeconfig(folder, server.url), "k8s-client-qps": "0"}
    hive = Hive(*parts, supply(known), invoke(needed), settings=settings)
    async with hive.started():
        with hive.get(Table[Family, NodeAddress]).txn() as rows:
            rows.put(NodeAddress(Family.IPV4, ip_address("192.0.2.1"), Origin.DEVICE))
        yield Agent(hive)


def needed(_: Identities, __: Table[Family, NodeAddress], ___: HealthTree) -> None: ...


def objects(server: Cluster) -> set[str]:
    kind = server.server.kinds.get("cilium.io", "v2", "ciliumidentities")
    assert kind is not None
    return {name for _, name in server.server.store.of(kind.storage).objects}


@pytest.fixture
async def server() -> AsyncIterator[Cluster]:
    async with cluster("ciliumidentities") as found:
        yield found


@pytest.mark.parametrize("mode", [READ_KEYS, READ_OBJECTS])
async def test_in_doublewrite_mode_an_identity_is_in_both_stores(
    etcd: Etcd, server: Cluster, tmp_path: Path, mode: str
) -> None:
    async with agent(etcd, tmp_path, server, mode) as one:
        web = await one.identities.acquire(WEB)
        await until(lambda: objects(server) == {str(web.id)} == set(keys(etcd, "id")))
        await until(lambda: list(keys(etcd, "value").values()) == [str(web.id)])
        await until(lambda: one.sees(web.id))
        server.delete("CiliumIdentity", str(web.id))
        etcd.delete(f"{STATE}id/{web.id}")
        await until(lambda: objects(server) == {str(web.id)} == set(keys(etcd, "id")))


async def test_a_cluster_changes_from_objects_to_keys(etcd: Etcd, server: Cluster, tmp_path: Path) -> None:
    """Numbers stay: of what is used, and of what only the objects know."""
    async with agent(etcd, tmp_path, server, READ_OBJECTS) as one:
        web = await one.identities.acquire(WEB)
        await until(lambda: str(web.id) in keys(etcd, "id"))
    server.put(body(4711, DB))
    async with agent(etcd, tmp_path, server, READ_KEYS) as one:
        await until(lambda: one.identities.get(web.id))
        assert (await one.identities.acquire(WEB)).id == web.id
        await until(lambda: not one.trouble())
    async with agent(etcd, tmp_path, server, "kvstore") as one:
        assert (await one.identities.acquire(WEB)).id == web.id


async def test_a_number_of_the_store_that_is_not_read_is_taken_for_its_labels(
    etcd: Etcd, server: Cluster, tmp_path: Path
) -> None:
    etcd.put(f"{STATE}id/4711", "k8s:app=db;k8s:io.kubernetes.pod.namespace=default;")
    async with agent(etcd, tmp_path, server, READ_OBJECTS) as one:
        await until(lambda: one.sees_key(4711))
        assert (await one.identities.acquire(DB)).id == 4711
        await until(lambda: objects(server) == {"4711"})


async def test_pods_do_not_wait_for_the_store_that_is_not_read(
    etcd: Etcd, server: Cluster, tmp_path: Path
) -> None:
    etcd.kill()
    async with agent(etcd, tmp_path, server, READ_OBJECTS) as one:
        web = await one.identities.acquire(WEB)
        assert objects(server) == {str(web.id)}
        etcd.start()
        await until(lambda: set(keys(etcd, "id")) == {str(web.id)})


async def test_an_identity_number_with_other_labels_in_the_kvstore_degrades_health(
    etcd: Etcd, server: Cluster, tmp_path: Path
) -> None:
    async with agent(etcd, tmp_path, server, READ_OBJECTS) as one:
        web = await one.identities.acquire(WEB)
        await until(lambda: one.sees(web.id))
        etcd.put(f"{STATE}id/{web.id}", "k8s:app=other;")
        await until(lambda: "have other labels in the kvstore" in one.trouble())
        etcd.delete(f"{STATE}id/{web.id}")
        await until(lambda: "other labels" not in one.trouble())
        await until(lambda: "app=web" in keys(etcd, "id").get(str(web.id), ""))


async def test_doublewrite_modes_need_an_api_server(etcd: Etcd, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="identity-allocation-mode=doublewrite-readcrd: there is no API"):
        async with agent(etcd, tmp_path, None, READ_OBJECTS):
            pass
