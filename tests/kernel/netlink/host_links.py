"""Creates links of pods through the agent's netlink."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cells import netlink
from cells.netlink.links import HostLinks
from cells.netlink.rows import parse_mac
from lifecycle import Hive, invoke

HOST_MAC, POD_MAC = parse_mac("02:00:00:00:00:01"), parse_mac("02:00:00:00:00:02")


def root(_links: HostLinks) -> None:
    """List the dependencies of the tests."""


@asynccontextmanager
async def host_links() -> AsyncIterator[HostLinks]:
    async with Hive(netlink.cell, invoke(root)).started() as hive:
        yield hive.get(HostLinks)
