"""Devices, addresses and routes by pyroute2: the same as the packed messages make, and loaded late."""

import socket
import subprocess
import sys
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from cells.netlink.connection import NetlinkError
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.network import Marked, NodeNetwork, leave_marked, take_marked
from cells.node.router import StartWriter
from cells.node.router_kernel import RouterWriter
from tests.kernel.netlink.host_links import HOST_MAC, POD_MAC, host_links
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


async def made(links: HostLinks, prefix: str) -> tuple[int, int]:
    """Indexes of a pair of these names, which ``prefix`` begins."""
    host, net = links.find(f"{prefix}0"), links.find(f"{prefix}1")
    assert host is not None
    assert net is not None
    return host.ifindex, net.ifindex


def shown(links: HostLinks, name: str) -> tuple[object, ...]:
    """All of a link but its index and name."""
    found = links.find(name)
    assert found is not None
    return (found.mac, found.mtu, found.kind, found.up, found.arp, found.tx_queue_length, found.link_netnsid)


async def test_synchronous_and_asynchronous_requests_have_the_same_effect(in_node: None) -> None:
    routes = (
        (ip_network("10.0.1.5/32"), None, None),
        (ip_network("10.0.1.0/24"), ip_address("10.0.1.5"), ip_address("10.0.1.5")),
        (ip_network("fd00::/112"), None, ip_address("fd00::5")),
    )
    async with host_links() as links:
        seen = []
        writers: list[tuple[str, RouterWriter]] = [("one", NodeNetwork()), ("two", StartWriter(links))]
        for prefix, writer in writers:
            await writer.create_veth(VethPair(f"{prefix}0", HOST_MAC, f"{prefix}1", POD_MAC, 1450, None))
            host, net = await made(links, prefix)
            for index, name in ((host, f"{prefix}0"), (net, f"{prefix}1")):
                await writer.set_device(index, name, 1450)
            for ip in (ip_address("10.0.1.5"), ip_address("fd00::5")):
                await writer.add_address(host, f"{prefix}0", ip)
            for route in routes * 2:
                await writer.set_route(host, *route)
            held = {str(each) for each in links.addresses()[host] if not each.is_link_local}
            found = {each[1:] for each in await links.routes(host) if not each.destination.is_link_local}
            seen.append((shown(links, f"{prefix}0"), shown(links, f"{prefix}1"), held, found))
            for _ in range(2):
                await writer.remove_address(host, f"{prefix}0", ip_interface("fd00::5"))
                await writer.remove_route(host, ip_network("fd00::/112"))
            assert not [each for each in await links.routes(host) if each.destination == routes[2][0]]
            await links.reap([host])
        assert seen[0] == seen[1]


def marked_ways() -> tuple[set[str], set[str]]:
    """Rules with a mark, and routes of the table 2004, as ip shows them."""
    shown = (
        subprocess.run(["ip", family, *asked], check=False, capture_output=True, text=True).stdout
        for family in ("-4", "-6")
        for asked in (["rule", "show", "priority", "9"], ["route", "show", "table", "2004"])
    )
    rules4, routes4, rules6, routes6 = (
        {" ".join(each.split()) for each in one.splitlines()} for one in shown
    )
    return rules4 | rules6, routes4 | routes6


async def test_marked_packets_are_taken_and_left_however_often_that_is_asked(in_node: None) -> None:
    marked = Marked(mark=0x200, mask=0xF00, table=2004, priority=9)
    both = (socket.AF_INET, socket.AF_INET6)
    for _ in range(2):
        take_marked(marked, both)
        rules, routes = marked_ways()
        assert rules == {"9: from all fwmark 0x200/0xf00 lookup 2004"}
        assert {each.split(" metric")[0] for each in routes} == {
            "local default dev lo proto static scope host",
            "local default dev lo proto static",
        }
    for _ in range(2):
        leave_marked(marked, both)
        assert marked_ways() == (set(), set())


async def test_a_refusal_of_the_kernel_is_reported_in_one_line(in_node: None) -> None:
    with pytest.raises(NetlinkError) as caught:
        await NodeNetwork().set_route(1, ip_network("10.0.1.0/24"), ip_address("192.0.2.1"), None)
    assert str(caught.value).startswith("set route 10.0.1.0/24: ")


def test_the_netlink_library_is_loaded_on_first_use() -> None:
    code = "import sys; import cells.agent; sys.exit('pyroute2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
