"""The device table follows a fake kernel: a list and a stream of notifications."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from ipaddress import IPv4Interface

import anyio
import pytest
from msgspec.structs import replace

from cells.node.devices import Device, DeviceSettings, DeviceSource, Kernel, addressed, device_table, uplinks
from lifecycle import HealthTree, Hive, SettingsError, Sources, Table, config, invoke, module, provide

pytestmark = pytest.mark.anyio


def device(ifindex: int, *addresses: str, name: str = "") -> Device:
    return Device(
        ifindex=ifindex,
        name=name or f"eth{ifindex}",
        kind="",
        mac=bytes(6),
        mtu=1500,
        up=True,
        addresses=tuple(map(IPv4Interface, addresses)),
    )


class FakeKernel:
    """Devices as set, hints as sent, a subscription that can break."""

    def __init__(self, *devices: Device) -> None:
        self.now = list(devices)
        self.listed = 0
        self.subscriptions = 0
        self._queue: asyncio.Queue[Exception | None] = asyncio.Queue()

    def devices(self) -> list[Device]:
        self.listed += 1
        return list(self.now)

    def hint(self, times: int = 1) -> None:
        for _ in range(times):
            self._queue.put_nowait(None)

    def break_off(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    @asynccontextmanager
    async def subscribed(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        self.subscriptions += 1

        async def changed() -> None:
            if error := await self._queue.get():
                raise error

        yield changed


def table() -> Table[int, Device]:
    return Table("devices", key=lambda row: row.ifindex)


async def wait_for_rows(rows: Table[int, Device], wanted: list[Device]) -> None:
    """Wait until the table holds exactly these."""
    with anyio.fail_after(30):
        async for _ in rows.changes():
            if sorted(rows.all(), key=lambda row: row.ifindex) == wanted:
                return


async def test_the_first_list_initializes_the_table() -> None:
    rows, kernel = table(), FakeKernel(device(1, "127.0.0.1/8"), device(2, "192.0.2.1/24"))
    source = DeviceSource(rows, kernel)
    assert not rows.initialized
    await source.start()
    assert rows.initialized
    assert rows.all() == kernel.now


async def test_a_refresh_writes_only_what_differs() -> None:
    kernel = FakeKernel(device(1), device(2), device(3))
    rows = table()
    source = DeviceSource(rows, kernel)
    source.refresh()
    kernel.now = [device(1), device(2, "192.0.2.1/24")]
    watcher = rows.changes(since=rows.revision)
    source.refresh()
    assert {(change.key, change.deleted) for change in watcher.take()} == {(2, False), (3, True)}
    source.refresh()
    assert watcher.take() == []


async def test_a_burst_of_hints_is_one_refresh() -> None:
    kernel = FakeKernel()
    source = DeviceSource(table(), kernel, settle=0.01)
    kernel.hint(1000)
    async with aclosing(source.hints()) as hints:  # type: ignore[type-var]  # typeshed lacks AsyncIterator.aclose
        await anext(hints)
        await anext(hints)
        with pytest.raises(TimeoutError), anyio.fail_after(0.05):
            await anext(hints)


def root(_table: Table[int, Device], _health: HealthTree) -> None:
    """What the test needs of the hive."""


async def test_the_table_follows_and_a_broken_subscription_is_renewed() -> None:
    kernel = FakeKernel(device(1))

    def fake() -> Kernel:
        return kernel

    cell = module(
        "devices", "Devices", config(DeviceSettings), provide(device_table), provide(fake), invoke(root)
    )
    async with Hive(cell).started() as hive:
        rows: Table[int, Device] = hive.get(Table[int, Device])
        assert rows.all() == [device(1)]
        kernel.now.append(device(2))
        kernel.hint()
        await wait_for_rows(rows, [device(1), device(2)])
        kernel.now.pop(0)
        kernel.break_off(OSError(105, "No buffer space available"))
        await wait_for_rows(rows, [device(2)])
        assert kernel.subscriptions == 2
        levels = {status.module: status.level for status in hive.get(HealthTree).snapshot()}
        assert levels["devices.watch"] == "ok"


async def test_only_configured_devices_are_uplinks_and_a_missing_one_is_reported() -> None:
    kernel = FakeKernel(
        device(1, "192.0.2.1/24", name="eth0"),
        device(2, "198.51.100.1/24", name="ens3"),
        device(3, "203.0.113.1/24", name="ens4"),
    )

    def fake() -> Kernel:
        return kernel

    cell = module(
        "devices", "Devices", config(DeviceSettings), provide(device_table), provide(fake), invoke(root)
    )
    async with Hive(cell, settings={"devices": "ens+ wlan0"}).started() as hive:
        rows: Table[int, Device] = hive.get(Table[int, Device])
        assert [one.name for one in uplinks(rows.all())] == ["ens3", "ens4"]
        assert [one.name for one in addressed(rows.all())] == ["eth0", "ens3", "ens4"]
        reported_of = {one.module: one.message for one in hive.get(HealthTree).snapshot()}
        assert reported_of["devices.selection"] == "devices names wlan0: the node has no such device"
        kernel.now = [device(4, "192.0.2.9/24", name="wlan0")]
        kernel.hint()
        await wait_for_rows(rows, [replace(one, named=True) for one in kernel.now])
        reported_of = {one.module: one.message for one in hive.get(HealthTree).snapshot()}
        assert reported_of["devices.selection"] == "devices names ens+: the node has no such device"


@pytest.mark.parametrize("text", ["eth 0", "eth0 eth1", "eth0,eth1", "eth+", "+"])
def test_devices_are_listed_with_commas_or_blanks(text: str) -> None:
    hive = Hive(config(DeviceSettings), settings=Sources([f"--devices={text}"]))
    (setting,) = hive.settings()
    assert setting.value == tuple(text.replace(",", " ").split())


@pytest.mark.parametrize("text", ["eth0:1", "a/b", "name-of-sixteen-c", "e+h"])
def test_an_invalid_device_name_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a valid device name; expected names such as eth0"):
        Hive(config(DeviceSettings), settings=Sources([f"--devices={text}"])).settings()
