"""The choice of the node's pod CIDR."""

from collections.abc import Mapping
from ipaddress import IPv4Interface, IPv4Network, IPv6Network
from pathlib import Path

import pytest
from anyio import wait_all_tasks_blocked

from cells.base.addresses import Family
from cells.config import AgentConfig
from cells.node.devices import Device
from cells.node.ipam import Ipam, cell
from cells.node.ipam.allocator import EXPIRATION, Clock
from cells.node.ipam.settings import automatic_range
from lifecycle import Hive, SettingsError, Table, UsageError, explain, invoke, replace, supply
from tests.unit.ipam.clock import FakeClock
from tests.unit.ipam.devices import Node, devices

pytestmark = pytest.mark.anyio


def device(ifindex: int, name: str, *addresses: str) -> Device:
    return Device(ifindex, name, "", bytes(6), 1500, True, tuple(map(IPv4Interface, addresses)))


def use(ipam: Ipam) -> None:
    """Something needs it."""


def hive(
    directory: Path,
    table: Table[int, Device],
    settings: Mapping[str, object],
    clock: Clock | None = None,
    **families: bool,
) -> Hive:
    node = supply(table, type=Table[int, Device]), supply(Node(directory, **families), type=AgentConfig)
    return Hive(cell, *node, invoke(use), replace(Clock, clock or FakeClock()), settings=settings)


LO = device(1, "lo", "127.0.0.1/8")


@pytest.mark.parametrize(
    ("rows", "network"),
    [
        ((LO, device(2, "eth0", "192.168.7.21/24")), "10.21.0.0/16"),
        ((device(1, "lo", "10.0.0.9/32"), device(2, "eth0", "192.168.7.21/24")), "10.21.0.0/16"),
        ((device(3, "eth1", "192.168.7.9/24"), device(2, "eth0", "169.254.1.1/16")), "10.9.0.0/16"),
        ((device(2, "eth0", "192.168.7.21/24"), device(3, "eth1", "198.51.100.4/24")), "10.4.0.0/16"),
        ((device(2, "cilium_host", "10.21.0.1/32"), device(3, "eth0", "172.16.0.5/12")), "10.5.0.0/16"),
    ],
)
def test_the_automatic_range_comes_from_the_first_global_address(
    rows: tuple[Device, ...], network: str
) -> None:
    assert automatic_range(rows) == IPv4Network(network)


async def test_the_range_is_found_at_start(tmp_path: Path) -> None:
    async with hive(tmp_path, devices(LO, device(2, "eth0", "192.168.7.21/24")), {}).started() as started:
        assert started.get(Ipam).ranges[Family.IPV4] == IPv4Network("10.21.0.0/16")


async def test_a_configured_range_needs_no_device(tmp_path: Path) -> None:
    async with hive(tmp_path, devices(), {"ipv4-range": "10.99.3.7/24"}).started() as started:
        ipam = started.get(Ipam)
        assert ipam.ranges[Family.IPV4] == IPv4Network("10.99.3.0/24")
        assert ipam.allocate_next("default/web")[0].ip in ipam.ranges[Family.IPV4]


async def test_no_address_and_no_range_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Exception) as failed:  # noqa: PT011  (start errors are groups)
        async with hive(tmp_path, devices(LO), {}).started():
            pass
    text = explain(failed.value)
    assert text is not None
    assert text.startswith("IPv4 allocation CIDR is not configured. Please specify --ipv4-range")
    assert "\n" not in text
    assert UsageError.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ipam": "eni"}, "ipam=eni is not supported yet: expected cluster-pool"),
        ({"ipam-multi-pool-pre-allocation": "a=x"}, 'invalid value for pool "a": x: expected a number'),
        ({"ipam": "hostscope"}, "ipam=hostscope: unknown IPAM backend, expected cluster-pool"),
        ({"ipv4-range": "10.0.0.0"}, "ipv4-range=10.0.0.0: expected auto or a network such as 10.5.0.0/16"),
        ({"ipv4-range": "fd00::/64"}, "ipv4-range=fd00::/64: expected auto or a network"),
        ({"ipv4-range": "0.0.0.0/1"}, "ipv4-range=0.0.0.0/1: too wide"),
        ({"ipv4-range": "10.0.0.1/32"}, "ipv4-range=10.0.0.1/32: too small, expected at most a /31"),
        (
            {"ipv4-range": "127.0.0.0/8"},
            "ipv4-range=127.0.0.0/8: expected unicast addresses that are not reserved",
        ),
        (
            {"ipv4-range": "192.0.0.0/2"},
            "ipv4-range=192.0.0.0/2: expected unicast addresses that are not reserved",
        ),
        ({"ipv6-range": "fd00::1"}, "ipv6-range=fd00::1: expected auto or a network such as fd00:5::/112"),
        (
            {"ipv6-range": "ff02::/16"},
            "ipv6-range=ff02::/16: expected unicast addresses that are not reserved",
        ),
        ({"ipv6-range": "fd00::/128"}, "ipv6-range=fd00::/128: too small, expected at most a /127"),
        ({"ipv6-cluster-alloc-cidr": "fd00::/48"}, "ipv6-cluster-alloc-cidr=fd00::/48: expected a /64"),
        ({"ipam-default-ip-pool": ""}, "ipam-default-ip-pool is empty"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text.replace(".", r"\.")):
        hive(tmp_path, devices(), settings).check()


async def test_a_running_agent_releases_what_expires(tmp_path: Path) -> None:
    clock = FakeClock()
    async with hive(tmp_path, devices(), {"ipv4-range": "10.1.0.0/24"}, clock).started() as started:
        ipam = started.get(Ipam)
        for owner in ("default/first", "default/second"):
            ipam.allocate_next_expiring(owner)
            await wait_all_tasks_blocked()
            clock.advance(EXPIRATION)
            await wait_all_tasks_blocked()
            assert ipam.dump() == {}


async def test_the_ipv6_range_is_the_ipv4_one_below_a_prefix(tmp_path: Path) -> None:
    node = devices(LO, device(2, "eth0", "192.168.7.21/24"))
    async with hive(tmp_path, node, {}, ipv6=True).started() as started:
        assert started.get(Ipam).ranges == {
            Family.IPV6: IPv6Network("f00d::a15:0:0:0/96"),
            Family.IPV4: IPv4Network("10.21.0.0/16"),
        }


async def test_the_automatic_range_stays_when_the_nodes_address_changes(tmp_path: Path) -> None:
    for address in ("192.168.7.21/24", "192.168.7.99/24"):
        async with hive(tmp_path, devices(device(2, "eth0", address)), {}).started() as started:
            assert started.get(Ipam).ranges[Family.IPV4] == IPv4Network("10.21.0.0/16")


async def test_auto_goes_on_with_a_range_that_was_configured(tmp_path: Path) -> None:
    node = devices(device(2, "eth0", "192.168.7.21/24"))
    for settings in ({"ipv4-range": "10.99.3.0/24"}, {}):
        async with hive(tmp_path, node, settings).started() as started:
            assert started.get(Ipam).ranges[Family.IPV4] == IPv4Network("10.99.3.0/24")


async def test_a_damaged_file_of_ranges_is_written_anew(tmp_path: Path) -> None:
    retained = tmp_path / "pod-ranges.json"
    for damage in ("", "{", '{"ipv4": "ff::/64"}', '{"ipv9": "10.1.0.0/16"}'):
        retained.write_text(damage)
        async with hive(tmp_path, devices(device(2, "eth0", "192.168.7.21/24")), {}).started() as started:
            assert started.get(Ipam).ranges[Family.IPV4] == IPv4Network("10.21.0.0/16")
        assert retained.read_text() == '{"ipv4":"10.21.0.0/16"}'
