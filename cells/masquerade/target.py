"""Native devices in the kernel: programs, and what they know. The target of a reconciler.

For:    Masquerade.   Needs: DevicePrograms (a Protocol), the map of devices.   Gives: DeviceTarget.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from msgspec import structs

from cells.maps import DEVICE_XDP, DeviceConfig, Map
from cells.masquerade.devices import NativeDevice
from cells.node.netlink import NetlinkError
from lifecycle import BatchError, BatchFailures, HiveError, Logger, ReadTable

_INDEX = struct.Struct("<I")


class DevicePrograms(Protocol):
    """The node's programs; cells.datapath.Datapath. Methods raise NetlinkError."""

    async def prepare_l3(self) -> None:
        """Have the programs of devices without Ethernet headers; HiveError if that cannot be."""
        ...

    def attach_device(self, ifindex: int, *, l3: bool) -> None:
        """Attach to a native device, ``l3``: one without Ethernet headers."""
        ...

    def accelerate_device(self, ifindex: int) -> bool:
        """Attach to its driver, too; False if that cannot be, and need not."""
        ...

    def slow_device(self, ifindex: int) -> None:
        """Take off what is attached to its driver."""
        ...

    def detach_device(self, ifindex: int) -> None:
        """Take off all that is attached."""
        ...

    def serves_device(self, ifindex: int, *, l3: bool, accelerated: bool) -> bool:
        """Whether it is there, and in the driver or not."""
        ...


class DeviceTarget:
    """Rows first, then programs: a program without its row lets everything pass.

    A row says that the driver has a program only once it has: others send packets to such a device.
    """

    def __init__(
        self,
        table: ReadTable[NativeDevice],
        rows: Callable[[], Map],
        programs: DevicePrograms,
        log: Logger,
    ) -> None:
        self._table = table
        self._rows = rows
        self._programs = programs
        self._log = log
        self._slow: dict[int, str] = {}
        """Names of devices whose drivers cannot, by index."""

    async def dump(self) -> Mapping[int, NativeDevice]:
        """What there is; a device without its programs, or that is not to have any, only by its index."""
        found: dict[int, NativeDevice] = {}
        for key, value in self._rows().items():
            (ifindex,) = _INDEX.unpack(key)
            wanted = self._table.get(ifindex)
            if wanted is not None and self._serves(wanted, value):
                found[ifindex] = wanted
            else:
                found[ifindex] = NativeDevice(ifindex, "", DeviceConfig.unpack(value))
        return found

    async def put(self, batch: Mapping[int, NativeDevice]) -> None:
        """Attach to devices. Raises BatchError; one that has gone is none of ours any more."""
        with BatchFailures(OSError, HiveError) as failures:
            for ifindex, device in batch.items():
                with failures.of(ifindex):
                    await self._put(device)

    async def drop(self, batch: Collection[int]) -> None:
        """Leave devices alone again. Raises BatchError."""
        failures: dict[int, Exception] = {}
        for ifindex in batch:
            self._slow.pop(ifindex, None)
            try:
                self._programs.detach_device(ifindex)
            except NetlinkError as error:
                if error.errno != errno.ENODEV:
                    failures[ifindex] = error
                    continue
            self._rows().delete(_INDEX.pack(ifindex))
        if failures:
            raise BatchError(failures)

    async def _put(self, device: NativeDevice) -> None:
        key, config = _INDEX.pack(device.ifindex), device.config
        if config.l3:
            await self._programs.prepare_l3()
        self._rows().update(key, _without_driver(config).pack())
        self._programs.attach_device(device.ifindex, l3=config.l3)
        if not config.flags & DEVICE_XDP:
            self._programs.slow_device(device.ifindex)
        elif self._programs.accelerate_device(device.ifindex):
            self._slow.pop(device.ifindex, None)
            self._rows().update(key, config.pack())
        elif self._slow.get(device.ifindex) != device.name:
            self._slow[device.ifindex] = device.name
            self._log.warning("a driver cannot serve clients outside: the stack does", device=device.name)

    def _serves(self, wanted: NativeDevice, row: bytes) -> bool:
        config = wanted.config
        if self._slow.get(wanted.ifindex) == wanted.name:
            config = _without_driver(config)
        if config.pack() != row:
            return False
        try:
            accelerated = bool(config.flags & DEVICE_XDP)
            return self._programs.serves_device(wanted.ifindex, l3=config.l3, accelerated=accelerated)
        except NetlinkError:
            return False


def _without_driver(config: DeviceConfig) -> DeviceConfig:
    return structs.replace(config, flags=config.flags & ~DEVICE_XDP)
