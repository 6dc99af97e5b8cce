"""Runs the real plugin and server over real links; endpoints and addresses are in memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog

from cells import netlink
from cells.cni.attach import Attacher
from cells.cni.detach import Detacher, LinkTeardown
from cells.cni.server import Checker, CniServer
from cells.netlink.links import HostLinks
from cells.netlink.namespaces import PodLink
from lifecycle import HealthTree, Hive, Lifecycle, invoke
from tests.support.cni_plugin import Ended, environment, run_plugin
from tests.support.namespaces import Namespaces, inside
from tests.unit.cni_server.fakes import FakeNode

SOCKET = Path("/run/cilium/cni.sock")
OPERATIONAL = 0x40 | 0x10000 | 0x20000
"""IFF_RUNNING, IFF_LOWER_UP and IFF_DORMANT: the kernel's link watch sets them some time after the call that
set the link up (Documentation/networking/operstates.rst).
"""


def _root(_links: HostLinks) -> None:
    """List the dependencies of the tests."""


@dataclass
class Node:
    """A server over real links; endpoints and addresses are in memory."""

    fakes: FakeNode
    links: HostLinks

    async def call(
        self, command: str, pod: Namespaces, cid: str = "cid1", version: str = "1.0.0", **conf: object
    ) -> Ended:
        """Run the plugin for the pod."""
        given = configuration(cniVersion=version, **conf)
        env = environment(command, CNI_NETNS=path_of(pod), CNI_CONTAINERID=cid)
        return await anyio.to_thread.run_sync(partial(run_plugin, env, given))


def configuration(**keys: object) -> dict[str, object]:
    """Return a network configuration for this server."""
    return {"name": "cilium", "type": "cilium-cni", "agent-socket": str(SOCKET), **keys}


def path_of(pod: Namespaces) -> str:
    """Return the path of the pod's namespace."""
    return f"/proc/{os.getpid()}/fd/{pod.net}"


@asynccontextmanager
async def serving(open_pod: type[PodLink] = PodLink) -> AsyncIterator[Node]:
    """Serve cni.sock over this node's links; the MTU is 1400."""
    async with Hive(netlink.cell, invoke(_root)).started() as hive:
        links, fakes, lifecycle, log = (
            hive.get(HostLinks),
            FakeNode(),
            Lifecycle("test"),
            structlog.get_logger(),
        )
        health = HealthTree().reporter("cni")
        teardown = LinkTeardown(links, fakes, fakes, lifecycle=lifecycle, health=health, log=log)
        attacher = Attacher(
            links,
            fakes,
            fakes,
            teardown,
            gateways=lambda: fakes.gateways,
            mtu=lambda: 1400,
            state=SOCKET.parent,
            log=log,
        )
        detacher = Detacher(fakes, teardown, log)
        server = CniServer(
            SOCKET, attacher, detacher, Checker(fakes), fakes, open_pod, lifecycle=lifecycle, log=log
        )
        async with teardown.running(), server.serving():
            yield Node(fakes, links)


@dataclass(frozen=True)
class Look:
    """A pod's interfaces, addresses and routes as read by pyroute2."""

    links: dict[str, Any]
    addresses: list[tuple[str, int]]
    routes: set[tuple[str, str, int]]
    """Destination, gateway, MTU."""

    @property
    def marks(self) -> dict[str, tuple[object, ...]]:
        """Return the attributes that identify each link."""
        return {
            name: (link["index"], link.get("address"), link["flags"] & ~OPERATIONAL)
            for name, link in self.links.items()
        }


async def look(pod: Namespaces) -> Look:
    """Read the pod's IPv4 state."""
    return await anyio.to_thread.run_sync(_look, pod)


def _look(pod: Namespaces) -> Look:
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as ip:
        links = {link.get("ifname"): link for link in ip.get_links()}
        addresses = [(a.get("address"), a["prefixlen"]) for a in ip.get_addr(family=2, label="eth0")]
        routes = set()
        for route in ip.get_routes(family=2, table=254):
            metrics = dict(route.get("metrics", {}).get("attrs", []))
            destination = f"{route.get('dst') or '0.0.0.0'}/{route['dst_len']}"
            routes.add((destination, route.get("gateway") or "", metrics.get("RTAX_MTU", 0)))
    return Look(links, addresses, routes)


def add_veth(pod: Namespaces) -> None:
    """Create an eth0 in the pod that the agent does not know."""
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as ip:
        ip.link("add", ifname="eth0", kind="veth", peer={"ifname": "other"})
