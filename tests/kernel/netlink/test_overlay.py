"""The tunnel's device in a real namespace: packed messages create, find and change it."""

import errno
import socket

import pytest

from cells.netlink.connection import NetlinkError
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.overlay import FoundOverlay, OverlayLinks
from tests.kernel.netlink.host_links import HOST_MAC, POD_MAC, host_links
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

NAME = "cilium_vxlan"


def found(links: OverlayLinks) -> FoundOverlay:
    device = links.find(NAME)
    assert device is not None
    return device


def test_a_device_is_made_found_changed_and_removed(in_node: None) -> None:
    links = OverlayLinks()
    assert links.find(NAME) is None
    links.create("vxlan", NAME, 1500, 8472, (40000, 40999))
    made = found(links)
    assert made == FoundOverlay(made.ifindex, "vxlan", False, 1500, 8472, (40000, 40999), True)
    for mtu in (1400, 1400, 1500):
        links.set_up(made.ifindex, NAME, mtu)
        assert (found(links).up, found(links).mtu, found(links).ifindex) == (True, mtu, made.ifindex)
    with pytest.raises(NetlinkError) as taken:
        links.create("vxlan", NAME, 1500, 8472)
    assert taken.value.errno == errno.EEXIST
    for _ in range(2):
        links.delete(made.ifindex)
    assert links.find(NAME) is None


def test_a_used_vxlan_port_is_reported_when_the_device_comes_up(in_node: None) -> None:
    links = OverlayLinks()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 8472))
        links.create("vxlan", NAME, 1500, 8472)
        with pytest.raises(NetlinkError) as refused:
            links.set_up(found(links).ifindex, NAME, 1500)
    assert refused.value.errno == errno.EADDRINUSE
    links.set_up(found(links).ifindex, NAME, 1500)


async def test_a_link_of_another_kind_is_described_by_its_kind(in_node: None) -> None:
    async with host_links() as host:
        assert isinstance(host, HostLinks)
        host.create_veth(VethPair(NAME, HOST_MAC, "other", POD_MAC, 1450, None))
    device = found(OverlayLinks())
    assert (device.kind, device.port, device.source_ports, device.metadata) == ("veth", 0, (0, 0), False)
