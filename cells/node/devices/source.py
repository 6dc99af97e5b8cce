"""Keeps Table[Device] equal to the kernel.

Needs: the kernel (a Protocol; ``kernel.py`` has the real one).   Gives: DeviceSource.

Events are hints: they say that something changed, never what. After a burst everything is listed again.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

import anyio

from cells.node.devices.device import Device, uplinks
from cells.node.devices.settings import DeviceSettings, matches
from lifecycle import Health, Hook, Initializer, Jobs, Lifecycle, Logger, Table

SETTLE = 0.05
"""Seconds that hints are gathered after the first."""


class Kernel(Protocol):
    """The node's devices, as far as this cell touches them."""

    def devices(self) -> list[Device]:
        """Every device now."""
        ...

    def subscribed(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """While it is open, the callable waits until something has changed since its last call.

        It raises when changes may have been missed: subscribe again.
        """
        ...


class DeviceSource:
    """Writes the table: once before the start goes on, then whenever something changed."""

    def __init__(
        self,
        table: Table[Device],
        kernel: Kernel,
        settings: DeviceSettings | None = None,
        settle: float = SETTLE,
    ) -> None:
        self._table = table
        self._kernel = kernel
        self._settings = settings or DeviceSettings()
        self._settle = settle
        self._first: Initializer = table.initializer("first list of devices")

    async def start(self) -> None:
        """Fill the table for the first time."""
        self.refresh()
        self._first.done()

    async def hints(self) -> AsyncIterator[None]:
        """One item right after subscribing (what came before was missed), then one per burst of changes."""
        async with self._kernel.subscribed() as changed:
            yield
            while True:
                await changed()
                with anyio.move_on_after(self._settle):
                    while True:
                        await changed()
                yield

    def refresh(self) -> None:
        """Make the table what the kernel says now."""
        found = {device.ifindex: self._told(device) for device in self._kernel.devices()}
        with self._table.txn() as txn:
            for known in self._table.all():
                if known.ifindex not in found:
                    txn.delete(known.ifindex)
            for device in found.values():
                txn.put(device)

    def missing(self) -> list[str]:
        """What the setting ``devices`` names and the node does not have."""
        names = [device.name for device in self._table.all()]
        return [
            wanted for wanted in self._settings.devices if not any(matches(wanted, name) for name in names)
        ]

    def _told(self, device: Device) -> Device:
        return device if self._settings.selects(device.name) else replace(device, selected=False)


def device_table(
    kernel: Kernel, settings: DeviceSettings, lifecycle: Lifecycle, jobs: Jobs, health: Health, log: Logger
) -> Table[Device]:
    """The table by ifindex. What needs it starts once it holds the devices there are."""
    table: Table[Device] = Table("devices", key=lambda device: device.ifindex)
    source = DeviceSource(table, kernel, settings)
    selection = health.child("selection")

    def tell() -> str:
        """What is wrong with the selection, empty if nothing."""
        if missing := source.missing():
            wrong = f"devices names {', '.join(missing)}: the node has no such device"
            selection.degraded(wrong)
            return wrong
        selection.ok(f"uplinks: {', '.join(one.name for one in uplinks(table.all())) or 'none'}")
        return ""

    async def start() -> None:
        await source.start()
        if wrong := tell():
            log.warning(wrong)

    async def refresh(_: None) -> None:
        source.refresh()
        tell()

    lifecycle.append(Hook("list devices", start))
    jobs.observe("watch", source.hints, refresh)
    return table
