"""Agents that allocate identities through a shared etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address

import structlog

from cells import kubernetes, kvstore
from cells.base.addresses import Family
from cells.cluster import allocation, identity
from cells.cluster.identity.identities import Identities
from cells.config import AgentConfig, AgentSettings
from cells.node.addresses import NodeAddress, Origin, address_table
from lifecycle import Hive, Lifecycle, Table, invoke, provide, supply
from lifecycle.testing import eventually
from tests.support.etcd import Etcd

STATE = "cilium/state/identities/v1/"


@asynccontextmanager
async def agent(etcd: Etcd, number: int = 1, **more: str) -> AsyncIterator[Identities]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    parts = (kubernetes.cell, kvstore.cell, identity.cell, allocation.cell, provide(address_table))
    settings = {
        "kvstore": "etcd",
        "kvstore-opt": f"etcd.address={etcd.url}",
        "kvstore-periodic-sync": "300ms",
    }
    hive = Hive(*parts, supply(known), invoke(needed), settings=settings | more)
    async with hive.started():
        with hive.get(Table[Family, NodeAddress]).txn() as rows:
            rows.put(NodeAddress(Family.IPV4, ip_address(f"192.0.2.{number}"), Origin.DEVICE))
        yield hive.get(Identities)


def needed(_: Identities, __: Table[Family, NodeAddress]) -> None: ...


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, within=30)


def keys(etcd: Etcd, kind: str) -> dict[str, str]:
    prefix = f"{STATE}{kind}/"
    return {key.removeprefix(prefix): value for key, value in etcd.all(prefix).items()}
