"""An agent with events that become flows."""

from __future__ import annotations

from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any, cast

import anyio

from cells.cluster.identity.identities import identity_table
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry
from cells.endpoint import Endpoint
from cells.hubble.codec import decode
from cells.hubble.flow import Flow, HubbleEvent
from cells.hubble.hubble import HubbleSettings, KnownNames
from cells.hubble.parser import FlowOrigin
from cells.hubble.rpc.observer import GetFlowsRequest, GetFlowsResponse
from cells.hubble.sources import EventSources
from cells.kubernetes.objects.core import Pod
from cells.policy.control import PolicyView
from cells.proxy.dns import NameStore
from cells.proxy.dns.cache import EndpointNames, Lookup
from lifecycle import Table
from tests.unit.hubble.recordings import recording

TRACE = bytes.fromhex(recording("pipeline")["perf_events"]["trace"])
"""From 10.0.0.11:40000, identity 20001, to 10.0.1.21:53, identity 30001."""


class FakeRows:
    """The kernel's ipcache."""

    def lookup(self, prefix: str) -> None:
        return None


class Agent:
    """The tables of an agent."""

    def __init__(self, policies: PolicyView | None = None, **settings: Any) -> None:
        self.endpoints: Table[int, Endpoint] = Table(
            "endpoints", key=lambda row: row.id, indexes={"name": lambda row: [f"ipv4:{row.ipv4}"]}
        )
        self.identities = identity_table()
        self.prefixes: Table[str, IpcacheEntry] = Table("ipcache", key=lambda row: row.prefix)
        self.pods: Table[tuple[str, str], Pod] = Table("pods", key=lambda row: row.key)
        self.names = cast("NameStore", SimpleNamespace(of={}, revision=0))
        known = KnownNames(
            self.endpoints,
            self.identities,
            Ipcache(self.prefixes, cast("Any", FakeRows())),
            self.pods,
            self.names,
            policies,
        )
        self.sources = EventSources(
            HubbleSettings(enable_hubble=True, **settings), known, FlowOrigin("node1")
        )

    def put(self, table: Table[Any, Any], row: object) -> None:
        with table.txn() as rows:
            rows.put(row)

    def events(self) -> list[HubbleEvent]:
        ring = self.sources.observer.ring
        found = (ring.event(number) for number in range(ring.begin, ring.end))
        return [event for event in found if event is not None]

    def flows(self) -> list[Flow]:
        async def read() -> list[GetFlowsResponse]:
            answers = self.sources.observer.get_flows(GetFlowsRequest())
            return [decode(GetFlowsResponse, each) async for batch in answers for each in batch]

        return [answer.flow for answer in anyio.run(read) if answer.flow is not None]

    def learn(self, name: str, address: str) -> None:
        names = self.names.of.setdefault(101, EndpointNames(50, 50))
        names.learn(Lookup(name, (IPv4Address(address),), 60, 0.0, 60.0))
        self.names.revision += 1
