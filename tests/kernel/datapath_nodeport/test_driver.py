"""Packets that the XDP program handles itself, and those it leaves to the tc program."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest

from cells.maps.records.cluster import IpcacheKey, IpcacheValue, TunnelConfig
from cells.maps.records.flows import DEVICE_XDP, NODEPORT_DSR_TCP, DeviceConfig
from cells.services import ServiceFlag
from tests.kernel.datapath.world import IFINDEX, A, raw
from tests.kernel.datapath_nodeport.world import (
    CLIENT,
    CLIENT_MAC,
    ELSEWHERE,
    HOP,
    NODE_PORT,
    OWN_MAC,
    SERVICE,
    XDP_DROP,
    XDP_PASS,
    XDP_REDIRECT,
    XDP_TX,
    DriverWorld,
    segment,
)
from tests.kernel.datapath_overlay.recorder import Route
from tests.kernel.datapath_services.services import Backend
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

LOCAL, FORWARD = 1, 2
NO_NEIGHBOUR = 7  # BPF_FIB_LKUP_RET_NO_NEIGH
HERE = {4: A.ip, 6: A.ip6}
FLAGS = ServiceFlag.ROUTABLE | ServiceFlag.NODE_PORT
OTHER_DEVICE = 9


@pytest.fixture(scope="module")
def driver() -> Iterator[DriverWorld]:
    need_root()
    with DriverWorld() as world:
        yield world


@pytest.fixture
def world(driver: DriverWorld) -> DriverWorld:
    driver.reset()
    return driver


def serve(world: DriverWorld, version: int, *backends: str) -> None:
    rows = [Backend(number, ip) for number, ip in enumerate(backends, 1)]
    world.services.serve(SERVICE[version], rows, port=NODE_PORT, flags=FLAGS)


def asked(world: DriverWorld, version: int) -> tuple[int, int]:
    """The verdict on a client's first packet, and the events about it."""
    packet = segment("tcp", CLIENT[version], SERVICE[version], 33333, NODE_PORT)
    run = world.in_driver(bytes(world.framed(packet)))
    return run.verdict, run.metadata


@pytest.mark.parametrize("version", [4, 6])
def test_xdp_forwards_packets_to_backends_of_other_nodes(world: DriverWorld, version: int) -> None:
    serve(world, version, ELSEWHERE[version].format(9))
    assert asked(world, version) == (XDP_TX, 0)
    world.serve_outside(NODEPORT_DSR_TCP)
    assert asked(world, version) == (XDP_TX, 0)


@pytest.mark.parametrize("version", [4, 6])
def test_xdp_marks_packets_to_local_pods_and_passes_them_to_tc(world: DriverWorld, version: int) -> None:
    serve(world, version, HERE[version])
    assert asked(world, version) == (XDP_PASS, LOCAL)


@pytest.mark.parametrize("version", [4, 6])
def test_xdp_passes_packets_to_unknown_neighbours_to_tc(world: DriverWorld, version: int) -> None:
    serve(world, version, ELSEWHERE[version].format(9))
    world.recorder.nothing(Route(NO_NEIGHBOUR, IFINDEX))
    assert asked(world, version) == (XDP_PASS, FORWARD)


def test_xdp_redirects_only_to_devices_with_a_program(world: DriverWorld) -> None:
    serve(world, 4, ELSEWHERE[4].format(9))
    world.recorder.nothing(Route(0, OTHER_DEVICE, raw(OWN_MAC), raw(HOP)))
    assert asked(world, 4) == (XDP_PASS, FORWARD)
    row = DeviceConfig(raw(CLIENT_MAC), flags=DEVICE_XDP)
    world.maps["hive_devices"].update(struct.pack("<I", OTHER_DEVICE), row.pack())
    assert asked(world, 4) == (XDP_REDIRECT, 0)


def test_xdp_passes_packets_for_the_tunnel_to_tc(world: DriverWorld) -> None:
    far = ELSEWHERE[4].format(9)
    serve(world, 4, far)
    world.maps["hive_tunnel"].update(bytes(4), TunnelConfig(77, 1450, 8472).pack())
    row = IpcacheValue(1000, IPv4Address("192.0.2.9"))
    world.maps["cilium_ipcache"].update(IpcacheKey.host(IPv4Address(far)).pack(), row.pack())
    assert asked(world, 4) == (XDP_PASS, FORWARD)


def test_a_service_without_backends_is_left_by_xdp_to_the_tc_program(world: DriverWorld) -> None:
    """The tc program answers clients that nothing listens."""
    serve(world, 4)
    assert asked(world, 4) == (XDP_PASS, 0)


def test_xdp_drops_clients_outside_the_source_ranges(world: DriverWorld) -> None:
    backends = [Backend(1, HERE[4])]
    world.services.serve(SERVICE[4], backends, port=NODE_PORT, flags=ServiceFlag(0))
    assert asked(world, 4) == (XDP_DROP, 0)
