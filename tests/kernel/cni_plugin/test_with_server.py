"""The real plugin, the real server and real links: what a pod gets, and that it all goes again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from cells import netlink
from cells.cni_server.attach import Attacher
from cells.cni_server.check import Checker
from cells.cni_server.departures import Departures
from cells.cni_server.detach import Detacher
from cells.cni_server.server import CniServer
from cells.netlink import HostLinks, NetlinkError, PodLink, mac_text
from lifecycle import HealthTree, Hive, Lifecycle, invoke
from tests.support.namespaces import Namespaces, in_node, inside, new_netns
from tests.unit.cni_server.fakes import FakeNode
from tests.unit.cni_server.harness import until
from tests.unit.cni_server.plugin import Ended, environment, run_plugin

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel
GATEWAY = IPv4Address("10.0.1.5")
SOCKET = Path("/run/cilium/cni.sock")


def root(_links: HostLinks) -> None:
    """What the tests need of the hive."""


class Stubborn(PodLink):
    """A pod that takes everything and then says no."""

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPv4Address | IPv6Address],
        gateways: Sequence[IPv4Address | IPv6Address],
        mtu: int,
    ) -> None:
        super().configure(ifindex, name, addresses, gateways, mtu)
        raise NetlinkError(errno.EPERM, f"add route to {name}")


@dataclass
class Node:
    """A server over real links, with endpoints and addresses of dicts."""

    fakes: FakeNode
    links: HostLinks

    async def call(self, command: str, pod: Namespaces, cid: str = "cid1", version: str = "1.0.0") -> Ended:
        """Run the plugin for the pod."""
        conf = {"cniVersion": version, "name": "cilium", "type": "cilium-cni", "agent-socket": str(SOCKET)}
        path = f"/proc/{os.getpid()}/fd/{pod.net}"
        env = environment(command, CNI_NETNS=path, CNI_CONTAINERID=cid)
        return await anyio.to_thread.run_sync(partial(run_plugin, env, conf))


@asynccontextmanager
async def serving(open_pod: type[PodLink] = PodLink) -> AsyncIterator[Node]:
    async with Hive(netlink.cell, invoke(root)).started() as hive:
        links, fakes, lifecycle, log = (
            hive.get(HostLinks),
            FakeNode(),
            Lifecycle("test"),
            structlog.get_logger(),
        )
        departures = Departures(links, fakes, lifecycle, HealthTree().reporter("cni"), log)
        attacher = Attacher(
            links, fakes, fakes, departures, gateways=lambda: fakes.gateways, mtu=lambda: 1400, log=log
        )
        detacher = Detacher(fakes, departures, log)
        server = CniServer(
            SOCKET, attacher, detacher, Checker(fakes), fakes, open_pod, lifecycle=lifecycle, log=log
        )
        async with departures.running(), server.serving():
            yield Node(fakes, links)


@dataclass(frozen=True)
class Look:
    """A pod's interfaces, addresses and routes as pyroute2 sees them."""

    links: dict[str, Any]
    addresses: list[tuple[str, int]]
    routes: set[tuple[str, str, int]]
    """Destination, gateway, MTU."""


def add_veth(pod: Namespaces) -> None:
    """An eth0 in the pod that nobody here knows of."""
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as ip:
        ip.link("add", ifname="eth0", kind="veth", peer={"ifname": "other"})


def reverse_path_filter(name: str) -> str:
    return Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").read_text(encoding="ascii").strip()


async def look(pod: Namespaces) -> Look:
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


async def test_a_pod_gets_its_interface_and_loses_it_again(in_node: None) -> None:
    with new_netns() as pod:
        async with serving() as node:
            added = await node.call("ADD", pod)
            assert (added.code, added.stderr) == (0, "")
            result = json.loads(added.stdout)
            ((number, endpoint),) = node.fakes.book.items()
            host = node.links.find(endpoint.ifname)
            assert host is not None
            assert (host.up, host.alias, host.mtu) == (True, f"hive endpoint {number}", 1400)
            assert (host.mac, host.ifindex) == (endpoint.host_mac, endpoint.ifindex)
            seen = await look(pod)
            eth0 = seen.links["eth0"]
            assert (eth0["state"], eth0.get("mtu")) == ("up", 1400)
            assert eth0.get("address") == mac_text(endpoint.pod_mac) == result["interfaces"][1]["mac"]
            assert seen.addresses == [(str(endpoint.ipv4), 32)]
            assert seen.routes == {("10.0.1.5/32", "", 0), ("0.0.0.0/0", "10.0.1.5", 1400)}
            assert endpoint.netns_cookie != 0
            assert reverse_path_filter(endpoint.ifname) == "0"

            again = await node.call("ADD", pod)
            assert "already exists" in again.stdout
            after = await look(pod)
            assert (after.addresses, after.routes) == (seen.addresses, seen.routes)

            assert (await node.call("DEL", pod)).code == 0
            assert not node.fakes.book
            await until(lambda: node.links.find(endpoint.ifname) is None and not node.fakes.addresses)
            assert set((await look(pod)).links) == {"lo"}
            assert (await node.call("DEL", pod)).code == 0


async def test_an_add_straight_after_a_delete_works(in_node: None) -> None:
    with new_netns() as pod:
        async with serving() as node:
            for version in ("0.2.0", "0.3.1", "0.4.0", "1.0.0"):
                added = await node.call("ADD", pod, version=version)
                assert (added.code, json.loads(added.stdout)["cniVersion"]) == (0, version)
                assert (await node.call("DEL", pod, version=version)).code == 0


@pytest.mark.parametrize("step", ["allocate", "create endpoint"])
async def test_a_failed_add_leaves_no_link(in_node: None, step: str) -> None:
    with new_netns() as pod:
        async with serving() as node:
            node.fakes.refuse.add(step)
            assert (await node.call("ADD", pod)).code == 1
            assert {link.name for link in node.links.links()} == {"lo"}
            assert set((await look(pod)).links) == {"lo"}
            assert node.fakes.clean()


async def test_a_pod_that_cannot_be_configured_is_taken_back(
    in_node: None,
) -> None:
    with new_netns() as pod:
        async with serving(open_pod=Stubborn) as node:
            ended = await node.call("ADD", pod)
            assert ended.json["msg"].startswith(
                "unable to configure interfaces in container namespace: error configuring IPv4: "
            )
            assert {link.name for link in node.links.links()} == {"lo"}
            assert node.fakes.clean()


async def test_a_leftover_interface_is_replaced(in_node: None) -> None:
    with new_netns() as pod:
        await anyio.to_thread.run_sync(add_veth, pod)
        async with serving() as node:
            assert (await node.call("ADD", pod)).code == 0
            assert set((await look(pod)).links) == {"lo", "eth0"}


async def test_a_burst_of_pods_is_attached_and_detached(in_node: None) -> None:
    pods = [new_netns() for _ in range(20)]
    async with serving() as node:
        for command in ("ADD", "DEL"):
            codes: list[int] = []

            async def one(number: int, pod: Namespaces, command: str, codes: list[int]) -> None:
                codes.append((await node.call(command, pod, f"cid{number}")).code)

            async with anyio.create_task_group() as tasks:
                for number, pod in enumerate(pods):
                    tasks.start_soon(one, number, pod, command, codes)
            assert codes == [0] * len(pods)
        await until(lambda: {link.name for link in node.links.links()} == {"lo"} and node.fakes.clean())
    for pod in pods:
        pod.close()
