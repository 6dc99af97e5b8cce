"""Host addresses are written to the maps, and only the node's are ever removed."""

import math
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface

import anyio
import pytest
import structlog

from cells.cluster.host_ip_sync import HostEntries, HostIPSettings, HostIPSync, wanted
from cells.cluster.identity.numbers import HOST, WORLD
from cells.cluster.ipcache import Ipcache, ipcache, ipcache_table
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Source
from cells.node.devices import Device
from cells.node.local_addresses import LxcTarget, local_address_table, local_addresses
from cells.node.router import Router
from lifecycle import (
    HealthTree,
    Hive,
    Reconciler,
    StartError,
    Table,
    Tables,
    config,
    invoke,
    module,
    provide,
    replace,
)
from lifecycle.tables import ReconcileError
from tests.unit.host_ip_sync.fakes import FakeMaps
from tests.unit.ipam.devices import devices
from tests.unit.ipcache.fakes import IpcacheOver
from tests.unit.local_addresses.fakes import LocalAddressesOver

ROUTER, ROUTER6 = IPv4Address("10.0.1.5"), IPv6Address("fd00:1::5")
EVERYWHERE, EVERYWHERE6 = IPv4Network("0.0.0.0/0"), IPv6Network("::/0")
EXCLUDED = [IPv4Network("192.0.2.0/24"), IPv4Network("10.0.1.0/24")]


def device(ifindex: int, *addresses: str) -> Device:
    return Device(
        ifindex=ifindex,
        name=f"eth{ifindex}",
        kind="",
        mac=bytes(6),
        mtu=1500,
        up=True,
        addresses=tuple(map(ip_interface, addresses)),
    )


async def sweep(maps: FakeMaps, *addresses: str) -> None:
    """The start of an agent on a node with these addresses, the first of each family its router's.

    Other claims of prefixes than the node's are none, so the ipcache keeps nothing else; endpoints keep their
    addresses.
    """
    routers = {ip.version: ip for ip in map(ip_address, reversed(addresses))}.values()
    rows = devices(device(1, *addresses)).derive(lambda found: wanted(found, tuple(routers)))
    known = IpcacheOver(maps.prefixes)
    local = LocalAddressesOver(maps.local)
    local.adopt(list(local.leftovers))
    target = HostEntries(local, known, structlog.get_logger())
    await Reconciler(rows, target, full_every=math.inf, name="hosts").sweep()
    known.discard(list(known.leftovers))
    await local.sweep()


def run(maps: FakeMaps, *addresses: str) -> None:
    """The same, from outside of an event loop."""
    anyio.run(partial(sweep, maps, *addresses))


def test_wanted_is_every_address_of_the_node_but_loopback() -> None:
    devices = [device(1, "127.0.0.1/8", "192.0.2.9/32"), device(2, "192.0.2.1/24"), device(3)]
    assert wanted(devices, [ROUTER]) == {
        EVERYWHERE: WORLD,
        IPv4Network("10.0.1.5"): HOST,
        IPv4Network("192.0.2.1"): HOST,
        IPv4Network("192.0.2.9"): HOST,
    }


def test_wanted_has_both_families_and_a_world_of_each() -> None:
    devices = [
        device(1, "127.0.0.1/8", "::1/128"),
        device(2, "192.0.2.1/24", "169.254.20.10/32", "2001:db8::1/64", "fe80::1/64"),
    ]
    assert list(wanted(devices, [ROUTER6, ROUTER]).items()) == [
        (EVERYWHERE6, 10),
        (EVERYWHERE, 9),
        (IPv6Network("2001:db8::1"), HOST),
        (IPv6Network("fd00:1::5"), HOST),
        (IPv4Network("10.0.1.5"), HOST),
        (IPv4Network("169.254.20.10"), HOST),
        (IPv4Network("192.0.2.1"), HOST),
    ]


def test_addresses_of_a_family_that_is_off_are_not_the_hosts() -> None:
    devices = [device(2, "192.0.2.1/24", "2001:db8::1/64")]
    assert wanted(devices, [ROUTER6]) == {
        EVERYWHERE6: WORLD,
        IPv6Network("2001:db8::1"): HOST,
        IPv6Network(ROUTER6): HOST,
    }


def test_excluded_addresses_are_not_the_hosts_but_the_routers_is() -> None:
    found = wanted([device(2, "192.0.2.1/24", "198.51.100.4/24", "10.0.1.5/32")], [ROUTER], EXCLUDED)
    assert found == {EVERYWHERE: WORLD, IPv4Network("198.51.100.4"): HOST, IPv4Network(ROUTER): HOST}


def test_an_excluded_network_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exclude-local-address=192\.0\.2\.1/24: expected a network"):
        HostIPSettings(exclude_local_address=("192.0.2.1/24",)).validate()


def test_a_first_run_writes_host_and_world() -> None:
    maps = FakeMaps()
    run(maps, "192.0.2.1", "10.0.1.5")
    assert maps.seen() == (
        {"10.0.1.5": True, "192.0.2.1": True},
        {"0.0.0.0/0": 2, "10.0.1.5/32": 1, "192.0.2.1/32": 1},
    )


def test_a_second_run_writes_nothing() -> None:
    maps = FakeMaps()
    run(maps, "192.0.2.1")
    writes = maps.writes
    run(maps, "192.0.2.1")
    assert maps.writes == writes


def test_an_address_that_left_the_node_leaves_the_maps() -> None:
    maps = FakeMaps()
    run(maps, "192.0.2.1", "192.0.2.2")
    run(maps, "192.0.2.1")
    assert maps.seen() == ({"192.0.2.1": True}, {"0.0.0.0/0": 2, "192.0.2.1/32": 1})


def test_both_families_are_written_and_leave() -> None:
    maps = FakeMaps()
    run(maps, "10.0.1.5", "fd00:1::5", "2001:db8::1")
    assert maps.seen() == (
        {"10.0.1.5": True, "fd00:1::5": True, "2001:db8::1": True},
        {"::/0": 10, "0.0.0.0/0": 9, "2001:db8::1/128": 1, "fd00:1::5/128": 1, "10.0.1.5/32": 1},
    )
    run(maps, "10.0.1.5", "fd00:1::5")
    assert "2001:db8::1" not in maps.seen()[0]


def test_a_family_that_is_switched_off_leaves_with_its_world() -> None:
    maps = FakeMaps()
    run(maps, "10.0.1.5", "fd00:1::5")
    run(maps, "10.0.1.5")
    assert maps.seen() == ({"10.0.1.5": True}, {"0.0.0.0/0": 2, "10.0.1.5/32": 1})
    run(maps, "10.0.1.5", "fd00:1::5")
    assert maps.seen()[1] == {"::/0": 10, "0.0.0.0/0": 9, "10.0.1.5/32": 1, "fd00:1::5/128": 1}


def test_endpoints_are_left_alone() -> None:
    maps = FakeMaps({"10.0.1.7": False, "10.0.1.8": True})
    run(maps, "192.0.2.1")
    assert maps.seen()[0] == {"10.0.1.7": False, "192.0.2.1": True}


@pytest.mark.anyio
async def test_an_endpoint_has_its_identity_again_when_its_address_is_the_nodes_no_more() -> None:
    maps = FakeMaps()
    table = devices(device(1, "192.0.2.1/24"))
    async with hive(table, maps).started() as started:
        pod = IpcacheEntry(prefix="192.0.2.1/32", identity=300, source=Source.LOCAL, resource="ep//7")
        started.get(Ipcache).upsert(pod)
        assert maps.seen()[1]["192.0.2.1/32"] == HOST
        with table.txn() as txn:
            txn.put(device(1))
        with anyio.fail_after(30):
            while maps.seen()[1].get("192.0.2.1/32") != 300:
                await anyio.lowlevel.checkpoint()


def test_an_address_of_the_node_beats_an_endpoint() -> None:
    maps = FakeMaps({"192.0.2.1": False}, {"192.0.2.1/32": 300})
    run(maps, "192.0.2.1")
    assert maps.seen() == ({"192.0.2.1": True}, {"0.0.0.0/0": 2, "192.0.2.1/32": 1})


def test_a_run_that_breaks_off_is_made_up_for() -> None:
    maps = FakeMaps()
    run(maps, "192.0.2.1", "192.0.2.2")
    maps.broken = True
    with pytest.raises(ReconcileError, match=r"hosts: 1 object failed.*Cannot allocate"):
        run(maps, "192.0.2.3")
    maps.broken = False
    run(maps, "192.0.2.3")
    assert maps.seen() == ({"192.0.2.3": True}, {"0.0.0.0/0": 2, "192.0.2.3/32": 1})


class FakeRouter(Router):
    """A router that has its address."""

    def __init__(self) -> None: ...

    @property
    def gateways(self) -> tuple[IPv4Address, ...]:
        return (ROUTER,)


def hive(table: Table[int, Device], maps: FakeMaps) -> Hive:
    def device_table() -> Table[int, Device]:
        return table

    def root(_health: HealthTree, _tables: Tables, _sync: HostIPSync) -> None: ...

    def addresses() -> LxcTarget:
        return maps.local.target

    def prefixes() -> IpcacheTarget:
        return maps.prefixes.target

    parts = (
        provide(ipcache_table, prefixes, ipcache),
        config(HostIPSettings),
        provide(device_table),
        replace(Router, FakeRouter()),
        provide(HostIPSync),
        module("local-addresses", "Addresses", provide(local_address_table, addresses, local_addresses)),
        invoke(root),
    )
    return Hive(module("host-ip-sync", "Host addresses", *parts))


@pytest.mark.anyio
async def test_the_start_ends_with_the_first_run_and_changes_follow() -> None:
    table, maps = devices(device(1, "192.0.2.1/24")), FakeMaps()
    async with hive(table, maps).started():
        assert IPv4Address("192.0.2.1") in maps.lxc
        assert ROUTER in maps.lxc
        with table.txn() as txn:
            txn.put(device(1, "192.0.2.2/24"))
        with anyio.fail_after(30):
            while IPv4Address("192.0.2.1") in maps.lxc:
                await anyio.lowlevel.checkpoint()
        assert IPv4Address("192.0.2.2") in maps.lxc


@pytest.mark.anyio
async def test_what_should_be_there_and_what_is_are_tables_to_look_at() -> None:
    async with hive(devices(device(1, "192.0.2.1/24")), FakeMaps()).started() as started:
        tables = started.get(Tables)
        assert tables.get("host-addresses").get(IPv4Network("192.0.2.1")) == HOST
        statuses = tables.get("host-addresses-status").all()
        assert {str(status.key): status.state for status in statuses} == dict.fromkeys(
            ("0.0.0.0/0", "10.0.1.5/32", "192.0.2.1/32"), "done"
        )


@pytest.mark.anyio
async def test_a_failing_first_run_fails_the_start() -> None:
    maps = FakeMaps()
    maps.broken = True
    with pytest.raises(StartError) as caught:
        async with hive(devices(device(1, "192.0.2.1/24")), maps).started():
            pass
    assert "Failed to sync host IPs: cannot update map cilium_" in str(caught.value.exceptions[0])


@pytest.mark.anyio
async def test_a_later_failure_degrades_and_is_retried() -> None:
    table, maps = devices(device(1, "192.0.2.1/24")), FakeMaps()
    async with hive(table, maps).started() as started:

        def level() -> str:
            snapshot = started.get(HealthTree).snapshot()
            return {each.module: each.level for each in snapshot}["host-ip-sync.sync"]

        maps.broken = True
        with table.txn() as txn:
            txn.put(device(1, "192.0.2.2/24"))
        with anyio.fail_after(30):
            while level() != "degraded":
                await anyio.lowlevel.checkpoint()
            maps.broken = False
            while level() != "ok" or IPv4Address("192.0.2.2") not in maps.lxc:
                await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_nothing_is_taken_out_before_devices_are_known() -> None:
    table = devices()
    source = table.initializer("test")
    maps = FakeMaps({"192.0.2.1": True}, {"192.0.2.1/32": 1})
    started = hive(table, maps).started()
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with started:
                assert maps.seen()[0] == {"10.0.1.5": True, "192.0.2.1": True}

        tasks.start_soon(start)
        await anyio.wait_all_tasks_blocked()
        assert maps.writes == 0
        with table.txn() as txn:
            txn.put(device(1, "192.0.2.1/24"))
        source.done()
