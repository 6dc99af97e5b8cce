"""Kernel settings that other cells need: written, and restored if other programs change them.

Reconciler: reads the table ``sysctls``, which Sysctls fills with the registered settings, and writes
/proc/sys.

Why: a configuration tool that resets rp_filter or forwarding would cut off pods. The kernel notifies of
changes of those two; all settings are compared every 30 seconds.
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


# Access to /proc/sys.

PROC: Final = Path("/proc/sys")
HOST_PROC: Final = Path("/host/proc/sys")
"""The node's /proc/sys in an unprivileged container, in which /proc/sys is read-only."""


class SysctlFiles:
    """Reads and writes settings by their paths below /proc/sys, e.g. ``net/ipv4/conf/all/rp_filter``."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or (HOST_PROC if HOST_PROC.is_dir() else PROC)

    def read(self, name: str) -> str | None:
        """Return the value; None if the setting does not exist (e.g. of a removed device)."""
        try:
            return (self.root / name).read_text(encoding="ascii").strip()
        except OSError:
            return None

    def write(self, name: str, value: str) -> None:
        """Write the value. Raises HiveError, one line with the remedy."""
        try:
            (self.root / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise HiveError(
                f"cannot set {name.replace('/', '.')}={value}: {error.strerror}; "
                f"make {self.root} writable for the agent, or set it on the node"
            ) from error


def sysctl_files() -> SysctlFiles:
    """Return the settings of this node."""
    return SysctlFiles()


# Ports that must not be ephemeral, because they are served.
#
# Source: kernel Documentation/networking/ip-sysctl.rst, ip_local_port_range and ip_local_reserved_ports.


def reserved_ports(local: str, reserved: str, ports: Sequence[int]) -> str | None:
    """Return a new value of ip_local_reserved_ports that reserves ``ports``; None if none is needed.

    ``local`` and ``reserved`` are the kernel's values of ip_local_port_range and ip_local_reserved_ports;
    ``ports`` are the first and the last port.
    """
    first, last = ports
    bounds = [int(word) for word in local.split()]
    if len(bounds) == 2 and (last < bounds[0] or first > bounds[1]):
        return None
    reserved_ranges = [_parse_range(part) for part in reserved.split(",") if part]
    if any(low <= first and last <= high for low, high in reserved_ranges):
        return None
    return ",".join(_range_text(*each) for each in _merged_ranges([*reserved_ranges, (first, last)]))


def _parse_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def _merged_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges and sort them, as the kernel does."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _range_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


# Registered settings, and their reconciliation.
#
# Source: kernel Documentation/networking/ip-sysctl.rst; rtnetlink's RTM_NEWNETCONF (linux/netconf.h).

INTERVAL: Final = seconds(30)

_RTMGRP_IPV4_NETCONF: Final = 1 << 23
_RTMGRP_IPV6_NETCONF: Final = 1 << 24
_RTM_NEWNETCONF: Final = 80
_ONE_SETTING: Final = 36
"""Bytes of a message about one setting: header 16, netconfmsg 4, ifindex 8, setting 8.

Messages about a new device contain all of its settings. Every pod causes one, so they are filtered out.
"""
CHANGED: Final = message_filter(
    (of_types(_RTM_NEWNETCONF), Field(LOAD_WORD, 0, (socket.htonl(_ONE_SETTING),)))
)


class Sysctl(msgspec.Struct, frozen=True):
    """A setting and its desired value."""

    name: str
    """The path below /proc/sys: ``net/ipv4/conf/all/rp_filter``."""
    value: str


class Sysctls(Target[str, Sysctl, Sysctl]):
    """Kernel settings of this node, which cells register and which are restored from then on.

    A setting that cannot be written degrades the module's health and is retried.
    """

    def __init__(self, files: SysctlFiles, *, jobs: Jobs, tables: Tables, log: Logger) -> None:
        self._files = files
        self._log = log
        self._table: Table[str, Sysctl] = Table("sysctls", key=lambda row: row.name)
        self._reconciler = Reconciler(self._table, self, full_every=INTERVAL)
        tables.add(self._table, self._reconciler.statuses)
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch", self._hints, self._trigger)

    def read(self, name: str) -> str | None:
        """Return the current value, or None if the setting does not exist."""
        return self._files.read(name)

    def enforce(self, settings: Mapping[str, str]) -> None:
        """Register settings, and write those that differ, in this order.

        Raises HiveError for the first one that cannot be written.
        """
        with self._table.txn() as rows:
            for name, value in settings.items():
                rows.put(Sysctl(name, value))
        self.write(settings)

    def release(self, names: Iterable[str]) -> None:
        """Unregister settings; their values are unchanged."""
        with self._table.txn() as rows:
            for name in names:
                rows.delete(name)

    def write(self, settings: Mapping[str, str]) -> None:
        """Write settings that differ once, in this order. Raises HiveError for the first error."""
        for name, value in settings.items():
            if self._files.read(name) != value:
                self._files.write(name, value)

    def check(self) -> None:
        """Compare all settings with the kernel now, e.g. after a device was recreated."""
        self._reconciler.trigger()

    # The reconciler's target

    async def observe(self) -> Mapping[str, Sysctl]:
        """Return the current values of the registered settings."""
        found = {row.name: self._files.read(row.name) for row in self._table.all()}
        return {name: Sysctl(name, value) for name, value in found.items() if value is not None}

    async def put(self, batch: Mapping[str, Sysctl]) -> None:
        """Write the settings that differ, in the order of their registration. Raises BatchError."""
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
                    "kernel setting was changed by another program, restored",
                    setting=name,
                    was=now,
                    now=row.value,
                )
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[str]) -> None:
        """A no-op: the value of an unregistered setting is unchanged."""
        del batch

    async def _hints(self) -> AsyncIterator[None]:
        groups = _RTMGRP_IPV4_NETCONF | _RTMGRP_IPV6_NETCONF
        async for hint in notifications(groups, CHANGED):
            yield hint

    async def _trigger(self, _: None) -> None:
        self.check()


cell = module(
    "sysctl",
    "Kernel settings, restored when others change them",
    provide(Sysctls),
    provide_private(sysctl_files),
)
