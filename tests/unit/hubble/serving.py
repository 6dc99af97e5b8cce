"""An agent's Hubble with three flows: its servers for clients and for metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio

from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.endpoint import Endpoint
from cells.hubble.enums import FlowVerdict
from cells.hubble.export.exporters import Exporters, HubbleExportSettings
from cells.hubble.flow import Flow, FlowEndpoint
from cells.hubble.hubble import Hubble
from cells.hubble.metrics.server import HubbleMetrics, HubbleMetricsServer, HubbleMetricsSettings
from cells.hubble.observer import FlowObserver
from cells.hubble.parser import FlowOrigin, Parser
from cells.hubble.rpc.server import HubbleServer, HubbleServerSettings
from lifecycle import (
    HealthTree,
    Hive,
    ReadTable,
    Table,
    config,
    invoke,
    module,
    provide,
    replace,
    supply,
)
from lifecycle.testing import fake


def observer() -> FlowObserver:
    """Three flows, of which the second was dropped."""
    origin = FlowOrigin(node_name="default/n1")
    flows = FlowObserver(7, origin, Parser(origin), "cilium v1.17.0")
    for second, verdict in enumerate((FlowVerdict.FORWARDED, FlowVerdict.DROPPED, FlowVerdict.FORWARDED)):
        when = (1_700_000_000 + second) * 1_000_000_000
        source = FlowEndpoint(namespace="ns1", pod_name=f"pod-{second}")
        flow = Flow(time=when, uuid=f"flow-{second}", verdict=verdict, source=source, node_name="default/n1")
        flows.add_event(flow, when)
    return flows


def node(name: str, address: str, cluster: str = "default") -> ClusterNode:
    ip = NodeIP("InternalIP", ip_address(address))
    return ClusterNode(cluster=cluster, name=name, source=Source.CUSTOM_RESOURCE, addresses=(ip,))


@asynccontextmanager
async def serving(folder: Path, **settings: object) -> AsyncIterator[Hive]:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    nodes.put(node("n1", "192.168.1.1"))
    hubble = fake(Hubble, observer=observer())
    hive = Hive(
        module(
            "hubble",
            "Hubble's sockets",
            config(HubbleServerSettings),
            config(HubbleMetricsSettings),
            config(HubbleExportSettings),
            provide(HubbleServer, HubbleMetrics, HubbleMetricsServer, Exporters),
            invoke(HubbleServer, HubbleMetrics, HubbleMetricsServer),
            replace(Hubble, hubble),
            supply(nodes, ReadTable[str, ClusterNode]),
            supply(Table[int, Endpoint]("endpoints", key=lambda row: row.id), Table[int, Endpoint]),
        ),
        settings={"hubble-socket-path": str(folder / "hubble.sock"), **settings},
    )
    async with hive.started():
        yield hive


async def in_thread(call: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(call)


def degraded(hive: Hive, part: str) -> str:
    """Why this part of Hubble is degraded; empty when it is not."""
    found = {one.module: one for one in hive.get(HealthTree).snapshot()}
    one = found.get(f"hubble.{part}" if part else "hubble")
    return one.message if one is not None and one.level == "degraded" else ""
