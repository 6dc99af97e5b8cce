"""Native devices in the kernel: programs, and what they know. The target of a reconciler.

For:    Masquerade.   Needs: DevicePrograms (a Protocol), the map of devices.   Gives: DeviceTarget.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from cells.maps import DeviceConfig, Map
from cells.masquerade.devices import NativeDevice
from cells.node.netlink import NetlinkError
from lifecycle import BatchError, BatchFailures, ReadTable

_INDEX = struct.Struct("<I")


class DevicePrograms(Protocol):
    """The node's programs; cells.datapath.Datapath. Methods raise NetlinkError."""

    def attach_device(self, ifindex: int) -> None:
        """Attach to a native device."""
        ...

    def detach_device(self, ifindex: int) -> None:
        """Take off what is attached."""
        ...

    def serves_device(self, ifindex: int) -> bool:
        """Whether it is there."""
        ...


class DeviceTarget:
    """Rows first, then programs: a program without its row lets everything pass."""

    def __init__(
        self, table: ReadTable[NativeDevice], rows: Callable[[], Map], programs: DevicePrograms
    ) -> None:
        self._table = table
        self._rows = rows
        self._programs = programs

    async def dump(self) -> Mapping[int, NativeDevice]:
        """What there is; a device without its programs, or that is not to have any, only by its index."""
        found: dict[int, NativeDevice] = {}
        for key, value in self._rows().items():
            (ifindex,) = _INDEX.unpack(key)
            wanted = self._table.get(ifindex)
            served = wanted is not None and wanted.config.pack() == value
            if served and wanted is not None and self._serves(ifindex):
                found[ifindex] = wanted
            else:
                found[ifindex] = NativeDevice(ifindex, "", DeviceConfig.unpack(value))
        return found

    async def put(self, batch: Mapping[int, NativeDevice]) -> None:
        """Attach to devices. Raises BatchError; one that has gone is none of ours any more."""
        with BatchFailures(OSError) as failures:
            for ifindex, device in batch.items():
                with failures.of(ifindex):
                    self._rows().update(_INDEX.pack(ifindex), device.config.pack())
                    self._programs.attach_device(ifindex)

    async def drop(self, batch: Collection[int]) -> None:
        """Leave devices alone again. Raises BatchError."""
        failures: dict[int, Exception] = {}
        for ifindex in batch:
            try:
                self._programs.detach_device(ifindex)
            except NetlinkError as error:
                if error.errno != errno.ENODEV:
                    failures[ifindex] = error
                    continue
            self._rows().delete(_INDEX.pack(ifindex))
        if failures:
            raise BatchError(failures)

    def _serves(self, ifindex: int) -> bool:
        try:
            return self._programs.serves_device(ifindex)
        except NetlinkError:
            return False
