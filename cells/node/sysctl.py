"""Kernel settings that other cells need, written and restored when changed.

Reconciler: reads the table ``sysctls``, which Sysctls fills with what cells ask for, and writes /proc/sys.
Why:        a configuration tool that resets rp_filter or forwarding would silently cut pods off. The kernel
            reports changes of those two; everything is read again every 30 seconds.
"""

import socket
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cells.netlink.connection import LOAD_WORD, Field, message_filter, notifications, of_types
from lifecycle import (
    BatchError,
    HiveError,
    Jobs,
    Logger,
    Reconciler,
    Table,
    Tables,
    Target,
    module,
    provide,
    provide_private,
    seconds,
)

__all__ = ["Sysctl", "SysctlFiles", "Sysctls", "cell", "reserved_ports", "sysctl_files"]


# The kernel's settings as files.

PROC: Final = Path("/proc/sys")
HOST_PROC: Final = Path("/host/proc/sys")
"""Where a container that is not privileged has the node's mounted: its own is read-only."""


class SysctlFiles:
    """Settings by their path below /proc/sys, such as ``net/ipv4/conf/all/rp_filter``."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or (HOST_PROC if HOST_PROC.is_dir() else PROC)

    def read(self, name: str) -> str | None:
        """The value, None if there is no such setting (of a device that no longer exists, say)."""
        try:
            return (self.root / name).read_text(encoding="ascii").strip()
        except OSError:
            return None

    def write(self, name: str, value: str) -> None:
        """Write it. Raises HiveError, one line with what to do."""
        try:
            (self.root / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise HiveError(
                f"cannot set {name.replace('/', '.')}={value}: {error.strerror}; "
                f"make {self.root} writable for the agent, or set it on the node"
            ) from error


def sysctl_files() -> SysctlFiles:
    """The node's."""
    return SysctlFiles()


# Ports that the kernel must not give to connections by itself, for they are served.
#
# Source: kernel Documentation/networking/ip-sysctl.rst, ip_local_port_range and ip_local_reserved_ports.


def reserved_ports(local: str, reserved: str, ports: Sequence[int]) -> str | None:
    """The change that ip_local_reserved_ports needs, None if the ranges are apart or already reserved.

    ``local`` and ``reserved`` are the kernel's current values; ``ports`` are the first and the last.
    """
    first, last = ports
    bounds = [int(word) for word in local.split()]
    if len(bounds) == 2 and (last < bounds[0] or first > bounds[1]):
        return None
    held = [_range(part) for part in reserved.split(",") if part]
    if any(low <= first and last <= high for low, high in held):
        return None
    return ",".join(_range_text(*each) for each in _merged([*held, (first, last)]))


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """As the kernel writes them: in order, and neighbours as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _range_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


# Settings that are maintained: as a table, and in the kernel.
#
# Source: kernel Documentation/networking/ip-sysctl.rst; rtnetlink's RTM_NEWNETCONF (linux/netconf.h).

INTERVAL: Final = seconds(30)

_RTMGRP_IPV4_NETCONF: Final = 1 << 23
_RTMGRP_IPV6_NETCONF: Final = 1 << 24
_RTM_NEWNETCONF: Final = 80
_ONE_SETTING: Final = 36
"""Bytes of a message about one setting: header 16, netconfmsg 4, the device's index 8, the setting 8.

Those about a new device list all of its settings; each pod has one, and they are skipped.
"""
CHANGED: Final = message_filter(
    (of_types(_RTM_NEWNETCONF), Field(LOAD_WORD, 0, (socket.htonl(_ONE_SETTING),)))
)


class Sysctl(msgspec.Struct, frozen=True):
    """A setting, and the value it is to have."""

    name: str
    """Below /proc/sys: ``net/ipv4/conf/all/rp_filter``."""
    value: str


class Sysctls(Target[str, Sysctl, Sysctl]):
    """Kernel settings of this node: cells register those they need, which are maintained from then on.

    One that cannot be written leaves the module degraded, and is tried again.
    """

    def __init__(self, files: SysctlFiles, *, jobs: Jobs, tables: Tables, log: Logger) -> None:
        self._files = files
        self._log = log
        self._table: Table[str, Sysctl] = Table("sysctls", key=lambda row: row.name)
        self._reconciler = Reconciler(self._table, self, full_every=INTERVAL)
        tables.add(self._table, self._reconciler.statuses)
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch", self._hints, self._look)

    def read(self, name: str) -> str | None:
        """The value now, None if there is no such setting."""
        return self._files.read(name)

    def keep(self, settings: Mapping[str, str]) -> None:
        """Write those settings that differ, in this order, and keep all of them so.

        Raises HiveError, one line, for the first that cannot be written.
        """
        with self._table.txn() as rows:
            for name, value in settings.items():
                rows.put(Sysctl(name, value))
        self.write(settings)

    def release(self, names: Iterable[str]) -> None:
        """Leave these settings to others from now on: they stay as they are."""
        with self._table.txn() as rows:
            for name in names:
                rows.delete(name)

    def write(self, settings: Mapping[str, str]) -> None:
        """Write those settings that differ, in this order, once. Raises HiveError for the first refused."""
        for name, value in settings.items():
            if self._files.read(name) != value:
                self._files.write(name, value)

    def check(self) -> None:
        """Compare everything with the kernel now, for example after a device was created again."""
        self._reconciler.trigger()

    # The reconciler's target

    async def observe(self) -> Mapping[str, Sysctl]:
        """The values of the maintained settings."""
        found = {row.name: self._files.read(row.name) for row in self._table.all()}
        return {name: Sysctl(name, value) for name, value in found.items() if value is not None}

    async def put(self, batch: Mapping[str, Sysctl]) -> None:
        """Write what differs, in the order the settings were asked for. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for row in [row for row in self._table.all() if row.name in batch]:
            now = self._files.read(row.name)
            if now == row.value:
                continue
            try:
                self._files.write(row.name, row.value)
            except HiveError as error:
                failures[row.name] = error
            else:
                name = row.name.replace("/", ".")
                self._log.warning(
                    "kernel setting was changed by others, restored", setting=name, was=now, now=row.value
                )
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[str]) -> None:
        """Nothing: a setting that is not maintained any more stays as it is."""
        del batch

    async def _hints(self) -> AsyncIterator[None]:
        groups = _RTMGRP_IPV4_NETCONF | _RTMGRP_IPV6_NETCONF
        async for hint in notifications(groups, CHANGED):
            yield hint

    async def _look(self, _: None) -> None:
        self.check()


cell = module(
    "sysctl",
    "Kernel settings, restored when others change them",
    provide(Sysctls),
    provide_private(sysctl_files),
)
