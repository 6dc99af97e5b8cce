"""The node's own addresses in real namespaces: they follow the default route."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cells import config, netlink
from cells.base.addresses import Family
from cells.node import addresses, devices
from cells.node.addresses import NodeAddresses
from lifecycle import Hive, invoke
from lifecycle.testing import eventually
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


def asked(_addresses: NodeAddresses) -> None:
    """What the tests need of the hive."""


@asynccontextmanager
async def node(**settings: str) -> AsyncIterator[NodeAddresses]:
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    cells = config.cell, netlink.cell, devices.cell, addresses.cell
    async with Hive(*cells, invoke(asked), settings=given).started() as hive:
        yield hive.get(NodeAddresses)


def run(*commands: str) -> None:
    for command in commands:
        assert os.system(command) == 0, command  # noqa: S605


def uplink(name: str) -> tuple[str, ...]:
    return f"ip link add {name} type veth peer name {name}x", f"ip link set {name}x up; ip link set {name} up"


async def test_addresses_on_lo_are_not_the_nodes_with_a_default_route_elsewhere(in_node: None) -> None:
    run("ip addr add 10.9.9.9/32 dev lo", *uplink("eth0"), "ip addr add 192.0.2.7/24 dev eth0")
    run("ip route add default via 192.0.2.1")
    async with node() as found:
        assert str(found.get(Family.IPV4)) == "192.0.2.7"


async def test_the_source_of_the_default_route_is_chosen(in_node: None) -> None:
    run("ip addr add 10.9.9.9/32 dev lo", *uplink("eth0"), *uplink("eth1"))
    run("ip addr add 192.0.2.7/24 dev eth0", "ip addr add 198.51.100.7/24 dev eth1")
    run("ip addr add 2001:db8:1::7/64 dev eth1 nodad", "ip -6 route add default via 2001:db8:1::1")
    async with node(enable_ipv6="true") as found:
        assert {str(family): str(ip) for family, ip in found.all().items()} == {
            "ipv6": "2001:db8:1::7",
            "ipv4": "192.0.2.7",
        }
        run("ip route add default via 198.51.100.1")
        await eventually(lambda: str(found.get(Family.IPV4)) == "198.51.100.7")
        run("ip route replace default via 198.51.100.1 src 10.9.9.9")
        await eventually(lambda: str(found.get(Family.IPV4)) == "10.9.9.9")
        run("ip route del default", "ip addr del 192.0.2.7/24 dev eth0")
        await eventually(lambda: str(found.get(Family.IPV4)) == "198.51.100.7")
        run("ip link del eth1")
        await eventually(lambda: found.all() == {})


async def test_a_setting_wins_over_what_is_found(in_node: None) -> None:
    run(*uplink("eth0"), "ip addr add 192.0.2.7/24 dev eth0", "ip addr add 192.0.2.8/24 dev eth0")
    async with node(ipv4_node="192.0.2.8") as found:
        assert str(found.get(Family.IPV4)) == "192.0.2.8"
