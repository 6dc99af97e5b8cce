"""Fixtures: the node of the packet tests with a native device, and few ports for NAT."""

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from cells.datapath.settings import DatapathSettings
from cells.maps.records.flows import DEVICE_MASQUERADE_IPV4, DEVICE_MASQUERADE_IPV6, DeviceConfig
from tests.kernel.datapath.world import IFINDEX, NODE, NODE6, World, raw
from tests.support.namespaces import need_root

FIRST_PORT, LAST_PORT = 65500, 65535
FEW = DatapathSettings(node_port_range=(30000, FIRST_PORT - 1), enable_sctp=True)


def device(flags: int = 0) -> DeviceConfig:
    """Return the device that every run uses."""
    return DeviceConfig(
        raw("0a:00:00:00:00:09"),
        IPv4Address(NODE),
        IPv6Address(NODE6),
        IPv4Network("10.1.0.0/16"),
        IPv6Network("fd00:10:1::/64"),
        DEVICE_MASQUERADE_IPV4 | DEVICE_MASQUERADE_IPV6 | flags,
    )


@pytest.fixture(scope="module")
def loaded_world() -> Iterator[World]:
    """Load maps and programs."""
    need_root()
    with World(FEW) as world:
        yield world


@pytest.fixture
def world(loaded_world: World) -> World:
    """Reset to no NAT entries."""
    loaded_world.reset()
    serve(loaded_world)
    return loaded_world


def serve(world: World, flags: int = 0) -> None:
    """Enable masquerading on the device."""
    world.maps["hive_devices"].update(struct.pack("<I", IFINDEX), device(flags).pack())
