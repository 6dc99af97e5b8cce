"""A router over the real kernel, and its routes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Network, IPv6Network

from cells import config, datapath, endpoint, kubernetes, maps, netlink
from cells.cluster import identity, ipcache
from cells.endpoint import host as host_endpoint
from cells.endpoint import restore as endpoint_restore
from cells.maps.node_maps import Maps
from cells.netlink.links import HostLinks
from cells.node import devices, ipam, local_addresses, router, sysctl
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.observe import controllers
from cells.policy import maps as policy_maps
from lifecycle import Hive, invoke

PODS = IPv4Network("10.0.1.0/24")
PODS6 = IPv6Network("fd00:1::/112")
CELLS = [
    each.cell
    for each in (
        config,
        controllers,
        datapath,
        devices,
        endpoint,
        endpoint_restore,
        host_endpoint,
        ipam,
        identity,
        ipcache,
        local_addresses,
        kubernetes,
        maps,
        netlink,
        policy_maps,
        router,
        sysctl,
    )
]


def root(_router: Router, _links: HostLinks, _maps: Maps, _ipam: Ipam) -> None:
    """List the dependencies of the tests."""


@asynccontextmanager
async def agent(**settings: str) -> AsyncIterator[Hive]:
    """Run the cells up to the router in this node."""
    given = {"ipv4-range": str(PODS), "state-dir": "/run/cilium", **settings}
    async with Hive(*CELLS, invoke(root), settings=given).started() as hive:
        yield hive


def ip(command: str) -> list[str]:
    """Return the lines that iproute2 prints, with runs of blanks as one."""
    with os.popen(f"ip -o {command}") as output:  # noqa: S605
        return sorted(" ".join(line.split()) for line in output)


DUAL = {"enable-ipv6": "true", "ipv6-range": str(PODS6)}


def routes6() -> list[str]:
    """Return the IPv6 routes, without link-local ones."""
    return [line.removesuffix(" pref medium") for line in ip("-6 route") if not line.startswith("fe80")]
