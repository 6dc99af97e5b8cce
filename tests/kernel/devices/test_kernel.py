"""The real kernel's devices reach the table."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_interface

import anyio
import pytest

from cells import netlink
from cells.config import AgentConfig
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.rows import random_mac
from cells.node import devices
from cells.node.devices import Device, NetlinkKernel
from lifecycle import Hive, Table, invoke, replace
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


def root(_table: Table[int, Device], _links: HostLinks) -> None:
    """What the tests need of the hive."""


@asynccontextmanager
async def node() -> AsyncIterator[tuple[Table[int, Device], HostLinks]]:
    agent = replace(AgentConfig, AgentConfig.__new__(AgentConfig))  # the pods' MTU is not read
    async with Hive(netlink.cell, devices.cell, agent, invoke(root)).started() as hive:
        yield hive.get(Table[int, Device]), hive.get(HostLinks)


async def wait_for(table: Table[int, Device], name: str, addresses: list[str] | None) -> None:
    """Wait until the device has exactly these addresses; None: until there is no such device."""
    wanted = None if addresses is None else tuple(map(ip_interface, addresses))
    with anyio.fail_after(30):
        async for _ in table.changes():
            found = {device.name: device.addresses for device in table.all()}
            if found.get(name) == wanted:
                return


def pair(one: str, two: str) -> VethPair:
    return VethPair(one, random_mac(), two, random_mac(), 1400, None)


async def test_existing_devices_are_listed_at_the_start(in_node: None) -> None:
    async with node() as (table, _):
        [lo] = table.all()
        assert (lo.name, lo.ifindex, lo.up) == ("lo", 1, True)
        assert lo.addresses == (IPv4Interface("127.0.0.1/8"), IPv6Interface("::1/128"))


async def test_devices_and_addresses_come_and_go(in_node: None) -> None:
    async with node() as (table, links):
        made = links.create_veth(pair("uplink0", "uplink1"))
        await wait_for(table, "uplink0", [])
        address = IPv4Address("192.0.2.7")
        links.add_address(made.host_ifindex, "uplink0", address)
        await wait_for(table, "uplink0", ["192.0.2.7/32"])
        device = table.get(made.host_ifindex)
        assert device is not None
        assert (device.kind, device.mtu, device.up) == ("veth", 1400, False)
        links.add_address(made.host_ifindex, "uplink0", IPv6Address("2001:db8::7"))
        await wait_for(table, "uplink0", ["192.0.2.7/32", "2001:db8::7/128"])
        links.remove_address(made.host_ifindex, "uplink0", IPv4Interface("192.0.2.7/32"))
        await wait_for(table, "uplink0", ["2001:db8::7/128"])
        links.remove_address(made.host_ifindex, "uplink0", IPv6Interface("2001:db8::7/128"))
        await wait_for(table, "uplink0", [])
        await links.reap([made.host_ifindex])
        await wait_for(table, "uplink0", None)


async def test_links_of_pods_are_neither_listed_nor_reported(in_node: None) -> None:
    async with node() as (_, links):
        kernel = NetlinkKernel(links)
        async with kernel.subscribed() as changed:
            made = links.create_veth(pair("lxc000000000001", "tmp00001"))
            for index in (made.host_ifindex, made.pod_ifindex):
                links.activate(index, "their link-local addresses come with their carriers")
            with pytest.raises(TimeoutError), anyio.fail_after(0.2):
                await changed()
            links.create_veth(pair("uplink0", "uplink1"))
            with anyio.fail_after(30):
                await changed()
        assert [device.name for device in kernel.devices()] == ["lo", "uplink1", "uplink0"]


async def test_an_overrun_socket_raises(in_node: None) -> None:
    async with node() as (_, links):
        made = links.create_veth(pair("uplink0", "uplink1"))
        async with NetlinkKernel(links).subscribed() as changed:
            for number in range(5000):
                links.set_device(made.host_ifindex, "uplink0", 1400 + number % 2)
            with pytest.raises(OSError, match="netlink events were lost: No buffer space"):
                await drain(changed)


async def drain(changed: Callable[[], Awaitable[None]]) -> None:
    with anyio.fail_after(30):
        while True:
            await changed()
