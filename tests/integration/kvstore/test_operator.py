"""The operator's kvstore tasks: heartbeat, leader election, and GC of unused identities."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import pytest

from cells import kvstore as store
from cells.kvstore.model import StoreError
from cells.operator import kvstore
from cells.operator.gc import GCSettings, IdentityPasses
from cells.operator.kvstore import KVStoreGC
from cells.operator.options import cell as options
from lifecycle import Hive, config, group, provide
from lifecycle.testing import eventually
from tests.support.etcd import Etcd

pytestmark = pytest.mark.anyio

STATE = "cilium/state/identities/v1/"


@asynccontextmanager
async def operator(etcd: Etcd, more: Mapping[str, str] = MappingProxyType({})) -> AsyncIterator[KVStoreGC]:
    async with started(etcd, more) as hive:
        yield hive.get(KVStoreGC)


@asynccontextmanager
async def started(etcd: Etcd, more: Mapping[str, str] = MappingProxyType({})) -> AsyncIterator[Hive]:
    settings = {"kvstore": "etcd", "kvstore-opt": f"etcd.address={etcd.url}", **more}
    found = group(config(GCSettings), options, provide(IdentityPasses))
    hive = Hive(found, store.cell, kvstore.cell, settings=settings)
    async with hive.started():
        yield hive


def numbers(etcd: Etcd) -> set[str]:
    return {key.rpartition("/")[2] for key in etcd.all(f"{STATE}id/")}


async def test_the_operator_updates_the_kvstore_heartbeat(etcd: Etcd) -> None:
    async with operator(etcd) as found:
        await eventually(lambda: etcd.all("cilium/.heartbeat"), within=30)
        etcd.delete("cilium/.heartbeat")
        await found.write_heartbeat()
        assert etcd.all("cilium/.heartbeat")["cilium/.heartbeat"].endswith("Z")


async def test_the_cluster_config_key_is_written_and_restored(etcd: Etcd) -> None:
    key = "cilium/cluster-config/mesh-5"
    cluster_config = {"id": 5, "capabilities": {"maxConnectedClusters": 255, "serviceExportsEnabled": False}}
    more = {"cluster-name": "mesh-5", "cluster-id": "5", "kvstore-periodic-sync": "100ms"}
    async with operator(etcd, more):
        await eventually(lambda: key in etcd.all(key), within=30)
        assert json.loads(etcd.all(key)[key]) == cluster_config
        etcd.put(key, "{}")
        await eventually(lambda: json.loads(etcd.all(key).get(key, "{}")) == cluster_config, within=30)
        etcd.delete(key)
        await eventually(lambda: key in etcd.all(key), within=30)


async def test_a_number_without_nodes_goes_in_the_second_pass(etcd: Etcd) -> None:
    for number, name in ((300, "web"), (301, "db"), (302, "cart")):
        etcd.put(f"{STATE}id/{number}", f"k8s:app={name};")
    etcd.put(f"{STATE}value/k8s:app=web;/192.0.2.1", "300")
    async with operator(etcd) as found:
        await found.collect()
        assert numbers(etcd) == {"300", "301", "302"}
        etcd.put(f"{STATE}id/302", "k8s:app=cart;")  # it has just been taken again
        await found.collect()
        assert numbers(etcd) == {"300", "302"}
        etcd.put(f"{STATE}value/k8s:app=cart;/192.0.2.2", "302")
        await found.collect()
        await found.collect()
        assert numbers(etcd) == {"300", "302"}
        etcd.delete(f"{STATE}value/k8s:app=web;/192.0.2.1")
        await found.collect()
        await found.collect()
        assert numbers(etcd) == {"302"}


async def test_passes_over_keys_are_counted(etcd: Etcd) -> None:
    for number, name in ((300, "web"), (301, "db")):
        etcd.put(f"{STATE}id/{number}", f"k8s:app={name};")
    etcd.put(f"{STATE}value/k8s:app=web;/192.0.2.1", "300")
    async with started(etcd) as hive:
        collector, passes = hive.get(KVStoreGC), hive.get(IdentityPasses)
        assert passes.runs == {("success", "kvstore"): 0, ("fail", "kvstore"): 0}
        await collector.collect()
        await collector.collect()
        assert passes.runs["success", "kvstore"] == 2
        assert passes.entries == {("alive", "kvstore"): 1, ("deleted", "kvstore"): 1}
        etcd.kill()
        with pytest.raises(StoreError):
            await collector.collect()
        assert passes.runs["fail", "kvstore"] == 1
