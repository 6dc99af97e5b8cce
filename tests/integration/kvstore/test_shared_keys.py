"""This node's pods in etcd: their addresses, and keys that others delete or overwrite."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from cells import kvstore
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig, AgentSettings
from cells.endpoint import Endpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.kubernetes.objects.core import Pod
from cells.kvstore.etcd import EtcdClient
from cells.kvstore.model import KeyEvent
from cells.remote.shared import SharedKeys, SharedTables
from lifecycle import Hive, Lifecycle, ReadTable, Table, invoke, provide, supply
from tests.integration.kvstore.agreeing import until
from tests.support.etcd import Etcd
from tests.unit.ciliumendpoint.endpoints import endpoint
from tests.unit.remote_nodes.nodes import node

pytestmark = pytest.mark.anyio
IPS = "cilium/state/ip/v1/default/"


class Node:
    """What a node publishes, and reads."""

    def __init__(self, _: SharedKeys, shared: SharedTables, endpoints: Table[int, Endpoint]) -> None:
        self._addresses, self.endpoints = shared.addresses, endpoints

    def identity_of(self, address: str) -> int:
        found = self._addresses.get(address)
        return 0 if found is None else found.identity


@asynccontextmanager
async def publishing(etcd: Etcd) -> AsyncIterator[Node]:
    agent = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    endpoints: Table[int, Endpoint] = Table("endpoints", key=lambda row: row.id)
    pods: Table[tuple[str, str], Pod] = Table("pods", key=lambda row: row.key)
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    nodes.put(replace(node(1, name=agent.node_name), source=Source.LOCAL))
    hive = Hive(
        kvstore.cell,
        provide(SharedTables, SharedKeys, Node),
        supply(agent),
        supply(ExposedEndpoints.__new__(ExposedEndpoints), ExposedEndpoints),
        supply(endpoints, type=Table[int, Endpoint]),
        supply(pods, type=Table[tuple[str, str], Pod]),
        supply(nodes, type=ReadTable[str, ClusterNode]),
        invoke(Node),
        settings={"kvstore": "etcd", "kvstore-opt": f"etcd.address={etcd.url}"},
    )
    async with hive.started():
        yield hive.get(Node)


async def test_a_key_that_is_deleted_is_written_again(etcd: Etcd) -> None:
    async with publishing(etcd) as found:
        found.endpoints.put(endpoint(7))
        await until(lambda: set(etcd.all(IPS)) == {f"{IPS}10.0.1.7", f"{IPS}fd00::7"})
        await until(lambda: found.identity_of("10.0.1.7") == 300)
        etcd.delete(f"{IPS}10.0.1.7")
        await until(lambda: set(etcd.all(IPS)) == {f"{IPS}10.0.1.7", f"{IPS}fd00::7"})
        found.endpoints.delete(7)
        await until(lambda: not etcd.all(IPS))


async def test_two_nodes_that_claim_one_address_do_not_overwrite_each_other_in_turn(etcd: Etcd) -> None:
    other = json.dumps({"IP": "10.0.1.7", "HostIP": "192.0.2.9", "ID": 301})
    async with publishing(etcd) as found:
        found.endpoints.put(endpoint(7))
        await until(lambda: f"{IPS}10.0.1.7" in etcd.all(IPS))
        await until(lambda: found.identity_of("10.0.1.7") == 300)
        for attempt in range(3):  # the first comparison may be due, and one more that it asks for itself
            etcd.put(f"{IPS}10.0.1.7", other)
            for number in range(8 + 4 * attempt, 12 + 4 * attempt):
                found.endpoints.put(endpoint(number))
                await until(lambda: f"{IPS}10.0.1.{number}" in etcd.all(IPS))  # noqa: B023
            if etcd.all(IPS)[f"{IPS}10.0.1.7"] == other:
                break
        else:
            raise AssertionError("the key of the other node was overwritten three times")
        await until(lambda: found.identity_of("10.0.1.7") == 301)


async def test_a_key_written_and_deleted_in_one_watch_response_is_written_again(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdClient, "watch", lagging(EtcdClient.watch))
    async with publishing(etcd) as found:
        for number in range(7, 12):  # the first comparison is over
            found.endpoints.put(endpoint(number))
            await until(lambda: f"{IPS}10.0.1.{number}" in etcd.all(IPS))  # noqa: B023
        assert not found.identity_of("10.0.1.11")
        etcd.delete(f"{IPS}10.0.1.11")
        await until(lambda: found.identity_of("10.0.1.7") == 300)
        await until(lambda: f"{IPS}10.0.1.11" in etcd.all(IPS))


Watch = Callable[[EtcdClient, str, int], AsyncGenerator[list[KeyEvent], None]]


def lagging(watch: Watch) -> Watch:
    """Hold events until a deletion, then yield them in one list, as etcd does for a watcher that lags."""

    async def held_until_deletion(client: EtcdClient, prefix: str, revision: int) -> Any:
        held: list[KeyEvent] = []
        async with aclosing(watch(client, prefix, revision)) as changes:
            async for events in changes:
                held += events
                if not events or any(event.kv is None for event in events):
                    yield held
                    held = []

    return held_until_deletion
