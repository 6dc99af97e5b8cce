"""What the operator does for the store: its heartbeat, and the end of numbers that no node uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cells.cluster import kvstore as store
from cells.operator import kvstore
from cells.operator.gc import GCSettings
from cells.operator.kvstore import KVStoreGC
from lifecycle import Hive, config, group
from lifecycle.testing import eventually
from tests.support.etcd import Etcd

pytestmark = pytest.mark.anyio

STATE = "cilium/state/identities/v1/"


@asynccontextmanager
async def operator(etcd: Etcd) -> AsyncIterator[KVStoreGC]:
    settings = {"kvstore": "etcd", "kvstore-opt": f"etcd.address={etcd.url}"}
    hive = Hive(group(config(GCSettings)), store.cell, kvstore.cell, settings=settings)
    async with hive.started():
        yield hive.get(KVStoreGC)


def numbers(etcd: Etcd) -> set[str]:
    return {key.rpartition("/")[2] for key in etcd.all(f"{STATE}id/")}


async def test_the_heart_beats(etcd: Etcd) -> None:
    async with operator(etcd) as found:
        await eventually(lambda: etcd.all("cilium/.heartbeat"), within=15)
        etcd.delete("cilium/.heartbeat")
        await found.beat()
        assert etcd.all("cilium/.heartbeat")["cilium/.heartbeat"].endswith("Z")


async def test_a_number_without_nodes_goes_in_the_second_pass(etcd: Etcd) -> None:
    for number, name in ((300, "web"), (301, "db"), (302, "cart")):
        etcd.put(f"{STATE}id/{number}", f"k8s:app={name};")
    etcd.put(f"{STATE}value/k8s:app=web;/192.0.2.1", "300")
    async with operator(etcd) as found:
        await found.collect()
        assert numbers(etcd) == {"300", "301", "302"}
        etcd.put(f"{STATE}id/302", "k8s:app=cart;")  # somebody has just taken it again
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
