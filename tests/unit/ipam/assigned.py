"""IPAM with ranges assigned by others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_network
from pathlib import Path

import anyio

from cells.base.addresses import Family, IPNetwork
from cells.node.devices import Device
from cells.node.ipam import Ipam, cell
from cells.node.ipam.pools import AssignedPodCIDRs
from lifecycle import Hive, Table, invoke, supply
from tests.unit.ipam.devices import Node, devices

V4 = Family.IPV4


class Given:
    """The ranges as they are assigned."""

    def __init__(self, *networks: str) -> None:
        self.networks = networks
        self.news = anyio.Event()

    def current(self) -> Mapping[Family, tuple[IPNetwork, ...]]:
        return {V4: tuple(map(ip_network, self.networks))} if self.networks else {}

    async def changes(self) -> AsyncIterator[object]:
        while True:
            await self.news.wait()
            self.news = anyio.Event()
            yield None

    def give(self, *networks: str) -> None:
        self.networks = networks
        self.news.set()


def hive(folder: Path, given: Given) -> Hive:
    def needed(_: Ipam) -> None: ...

    return Hive(
        cell,
        supply(devices(), type=Table[int, Device]),
        supply(Node(folder), type=Node.__bases__[0]),
        supply(given, type=AssignedPodCIDRs),
        invoke(needed),
    )
