"""BIG TCP on the node's devices: limits that all of them support, and 64 KiB when it is disabled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import IPv4Address
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from cells import netlink
from cells.base.addresses import Family
from cells.config import AgentConfig
from cells.datapath.settings import HostRouting
from cells.netlink.links import HostLinks
from cells.netlink.messages import OffloadLimits, VethPair
from cells.netlink.rows import Offloads, random_mac
from cells.node import big_tcp, devices
from cells.node.big_tcp import BigTcp
from cells.tunnel.settings import TunnelSettings
from lifecycle import Hive, Settings, StartError, config, invoke, replace
from lifecycle.testing import eventually
from tests.support.namespaces import in_node, new_netns

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel
USUAL = OffloadLimits()
BIG = OffloadLimits(196608, 196608, 196608, 196608)
NONE: frozenset[Family] = frozenset()
FOUR: dict[str, Any] = {"enable-ipv4-big-tcp": True}
SIX: dict[str, Any] = {"enable-ipv6-big-tcp": True}
BOTH = FOUR | SIX


class Encryption(Settings, frozen=True):
    """As the cells of encryption have them."""

    enable_wireguard: bool = False
    enable_ipsec: bool = False


def root(_big_tcp: BigTcp, _links: HostLinks) -> None:
    """What the tests need of the hive."""


@asynccontextmanager
async def node(*, past_stack: bool = True, **settings: object) -> AsyncIterator[tuple[BigTcp, HostLinks]]:
    """A node with an agent of these settings; routing is native unless they are about it."""
    agent = replace(AgentConfig, AgentConfig.__new__(AgentConfig))  # the pods' MTU is not read
    routing = replace(HostRouting, HostRouting(past_stack=past_stack))
    cells = netlink.cell, devices.cell, big_tcp.cell, agent, routing, config(TunnelSettings, Encryption)
    given = {"routing-mode": "native", **{name.replace("_", "-"): value for name, value in settings.items()}}
    async with Hive(*cells, invoke(root), settings=given).started() as hive:
        yield hive.get(BigTcp), hive.get(HostLinks)


def make_uplink(links: HostLinks, name: str, limits: OffloadLimits = USUAL) -> int:
    made = links.create_veth(VethPair(name, random_mac(), f"{name}-peer", random_mac(), 1500, None, limits))
    links.activate(made.host_ifindex, "uplink")
    links.add_address(made.host_ifindex, name, IPv4Address("192.0.2.7"))
    return made.host_ifindex


@pytest.mark.parametrize(
    ("settings", "limits", "families"),
    [
        (BOTH, BIG, frozenset(Family)),
        (
            {"enable-ipv4-big-tcp": True},
            OffloadLimits(gro_ipv4=196608, gso_ipv4=196608),
            frozenset({Family.IPV4}),
        ),
        ({"enable-ipv6-big-tcp": True}, OffloadLimits(gro=196608, gso=196608), frozenset({Family.IPV6})),
    ],
    ids=["both", "IPv4", "IPv6"],
)
async def test_uplinks_and_pods_get_large_packets_of_the_families_that_are_on(
    in_node: None, settings: dict[str, Any], limits: OffloadLimits, families: frozenset[Family]
) -> None:
    async with node() as (_, links):
        device = make_uplink(links, "uplink0")
    async with node(**settings) as (found, links):
        assert (found.enabled, found.limits) == (families, limits)
        assert links.offloads(device).limits == limits
        with new_netns() as pod:
            made = links.create_veth(
                VethPair("lxc1", random_mac(), "eth0", random_mac(), 1500, pod.net, found.limits)
            )
            assert links.offloads(made.host_ifindex).limits == limits
        later = make_uplink(links, "uplink1")
        await eventually(lambda: links.offloads(later).limits == limits)
    async with node() as (found, links):  # switched off again
        assert (found.enabled, found.limits) == (NONE, USUAL)
        assert links.offloads(device).limits == links.offloads(later).limits == USUAL


async def test_packets_are_as_large_as_the_weakest_uplink_takes_them(in_node: None) -> None:
    async with node() as (_, links):
        make_uplink(links, "uplink0")
        weak = make_uplink(links, "uplink1")
    read = HostLinks.offloads

    def offloads(links: HostLinks, ifindex: int) -> Offloads:
        found = read(links, ifindex)
        return found._replace(largest=131072) if ifindex == weak else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostLinks, "offloads", offloads)
        async with node(**BOTH) as (found, links):
            assert found.limits == OffloadLimits(131072, 131072, 131072, 131072)
            assert links.offloads(weak).limits == found.limits


async def test_a_device_that_takes_no_large_packets_leaves_it_off_everywhere(in_node: None) -> None:
    async with node() as (_, links):
        able = make_uplink(links, "uplink0")
        await anyio.run_process("ip tuntap add mode tap uplink1 && ip link set uplink1 up", check=True)
        await anyio.run_process("ip addr add 192.0.2.8/24 dev uplink1", check=True)
    with capture_logs() as logs:
        async with node(**BOTH) as (found, links):
            assert (found.enabled, found.limits, links.offloads(able).limits) == (NONE, USUAL, USUAL)
    (line,) = [one for one in logs if one["log_level"] == "warning"]
    assert line["event"] == "BIG TCP disabled: a device does not support it"


async def test_without_an_uplink_it_is_off(in_node: None) -> None:
    with capture_logs() as logs:
        async with node(**BOTH) as (found, _):
            assert (found.enabled, found.limits) == (NONE, USUAL)
    events = [one["event"] for one in logs if one["log_level"] == "warning"]
    assert events == ["BIG TCP disabled: the node has no uplink"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"routing_mode": "tunnel"}, "in tunneling mode; set routing-mode=native"),
        ({"enable_wireguard": True}, "with encryption enabled; set enable-wireguard=false"),
        ({"enable_ipsec": True}, "with encryption enabled; set enable-ipsec=false"),
        (
            {"past_stack": False},
            "with legacy host routing; set kube-proxy-replacement=true, and leave enable-host-legacy",
        ),
    ],
)
async def test_what_it_cannot_be_used_with_is_refused(
    in_node: None, settings: dict[str, Any], why: str
) -> None:
    start = partial(node, **settings)
    async with start():  # without it, all of this works
        pass
    with pytest.raises(StartError, match="enable-ipv6-big-tcp=true: BIG TCP is not supported " + why):
        async with start(enable_ipv6_big_tcp=True):
            pass
