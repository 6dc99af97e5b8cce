"""Dispatchers at interfaces, XDP programs of devices, and programs of devices without Ethernet headers.

Datapath uses all three. The dispatchers are pinned, and reused by the next agent if they are unchanged.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from cells.datapath.generation import active_program_ids, load_and_publish
from cells.datapath.libbpf import LoadedObject
from cells.datapath.programs import DISPATCHERS, L3_ENTRIES, XDP_DISPATCHER, XDP_ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings
from cells.maps.bpf import (
    BpfError,
    ProgramInfo,
    open_program,
    program_by_id,
    program_info,
    program_name,
    replace_pin,
    unpin_unfinished,
)
from cells.maps.map import Map, map_by_id
from cells.maps.node_maps import Maps
from cells.netlink.connection import NetlinkError
from cells.netlink.links import HostLinks

__all__ = ["is_ours"]


class Dispatchers:
    """Open descriptors of the dispatchers. ``stale``: interfaces still have an earlier agent's."""

    def __init__(self, descriptors: Mapping[str, int], *, stale: bool) -> None:
        self.descriptors = dict(descriptors)
        self.stale = stale

    @classmethod
    def load(cls, data: bytes, name: str, tables: Collection[Map], pins: Path) -> Self:
        """Return the pinned dispatchers if instructions and maps are unchanged, else load new ones.

        New ones are not pinned: the pins stand for what is attached, so call :meth:`pin_all` after attaching.
        Raises LoadError.
        """
        unpin_unfinished(pins, DISPATCHERS)
        with LoadedObject(data, name) as loaded:
            loaded.use_maps({table.spec.name: table.fd for table in tables})
            loaded.load()
            loaded.expect(DISPATCHERS)
            fresh = loaded.programs()
            pinned = open_dispatcher_pins(pins)
            if all(program in pinned and same(pinned[program], fresh[program]) for program in DISPATCHERS):
                return cls(pinned, stale=False)
            close_all(pinned.values())
            return cls({program: os.dup(fresh[program]) for program in DISPATCHERS}, stale=True)

    def pin_all(self, pins: Path) -> None:
        """Pin the dispatchers, after they were attached to all interfaces."""
        pins.mkdir(parents=True, exist_ok=True)
        for name, descriptor in self.descriptors.items():
            replace_pin(descriptor, pins / name)
        self.stale = False

    def unpinned(self, pins: Path) -> list[str]:
        """Return the names of dispatchers that are not pinned, or with another program at their pin."""
        pinned = open_dispatcher_pins(pins)
        try:
            return [
                name
                for name, descriptor in self.descriptors.items()
                if name not in pinned or program_info(pinned[name]).id != program_info(descriptor).id
            ]
        finally:
            close_all(pinned.values())

    def describe(self) -> dict[str, ProgramInfo]:
        """Return the programs by name."""
        return {name: program_info(descriptor) for name, descriptor in self.descriptors.items()}

    def close(self) -> None:
        """Close the descriptors; pinned and attached programs stay."""
        close_all(self.descriptors.values())
        self.descriptors.clear()


def open_dispatcher_pins(pins: Path) -> dict[str, int]:
    """Return descriptors of the pinned dispatchers."""
    found = {}
    for name in DISPATCHERS:
        try:
            found[name] = open_program(pins / name)
        except BpfError:  # missing, or not a program: it will be replaced
            continue
    return found


def same(old: int, new: int) -> bool:
    """Return whether two programs have the same name, instructions and maps."""
    was, is_ = program_info(old), program_info(new)
    return (was.tag, was.name, set(was.map_ids)) == (is_.tag, is_.name, set(is_.map_ids))


def close_all(descriptors: Collection[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# XDP programs of devices, which handle NodePort packets of external clients before the stack.
#
# Source: net/core/dev.c (dev_change_xdp_fd), linux/if_link.h (XDP_FLAGS_*).

XDP_OBJECT: Final = PACKAGED_OBJECTS / "xdp.o"
_SLOT: Final = bytes(4)


class XdpAcceleration:
    """The XDP program for NodePort: one for all devices, called by an XDP dispatcher on each."""

    def __init__(self, settings: DatapathSettings, maps: Maps, links: HostLinks) -> None:
        self._settings = settings
        self._maps = maps
        self._links = links
        self._programs: MappingProxyType[str, int] = MappingProxyType({})

    def activate(self, tables: tuple[Map, ...], data: bytes, generation: int) -> None:
        """Load the program and enter it into hive_xdp_entry; remove it without acceleration.

        Does nothing if it is active already. For a worker thread. Raises LoadError and BpfError.
        """
        with map_by_id(self._maps.xdp_entry.id, writable=True) as entry:
            if self._settings.accelerates:
                load_and_publish(
                    entry, XDP_ENTRIES, data, XDP_OBJECT.name, tables, generation, self._settings
                )
            else:
                entry.delete(_SLOT)
            self._programs = MappingProxyType(active_program_ids(entry, XDP_ENTRIES))

    def missing(self) -> list[str]:
        """Return the names of programs that are no longer entered. For a worker thread."""
        with map_by_id(self._maps.xdp_entry.id) as entry:
            now = active_program_ids(entry, XDP_ENTRIES)
        return [name for name, number in self._programs.items() if now.get(name) != number]

    @property
    def programs(self) -> MappingProxyType[str, int]:
        """Kernel ids by name; empty without acceleration."""
        return self._programs

    def attach(self, ifindex: int, dispatcher: int) -> bool:
        """Attach the dispatcher to a device, replacing an earlier one of ours.

        Returns False if the driver does not support XDP and the setting is best-effort. Raises NetlinkError
        if it fails otherwise, or if the device has a foreign XDP program.
        """
        generic = self._settings.generic_xdp
        try:
            self._detach(ifindex, generic=not generic)  # the kernel allows only one mode at a time
            with self._present(ifindex, generic=generic) as present:
                if present is None or program_info(present).id != program_info(dispatcher).id:
                    self._links.set_xdp(ifindex, dispatcher, generic=generic, instead_of=present)
        except NetlinkError as error:
            if self._settings.bpf_lb_acceleration == "best-effort" and error.errno != errno.ENODEV:
                return False
            raise
        return True

    def detach(self, ifindex: int) -> None:
        """Detach our dispatcher from a device. Raises NetlinkError."""
        for generic in (False, True):
            self._detach(ifindex, generic=generic)

    def serves(self, ifindex: int, dispatcher: int) -> bool:
        """Return whether this dispatcher is attached in the configured mode. Raises NetlinkError."""
        found = self._links.xdp(ifindex)
        return (found.generic if self._settings.generic_xdp else found.native) == dispatcher

    def has_any(self, ifindex: int) -> bool:
        """Return whether a dispatcher of ours, of any version, is attached. Raises NetlinkError."""
        return any(map(is_ours, self._links.xdp(ifindex)))

    def _detach(self, ifindex: int, *, generic: bool) -> None:
        found = self._links.xdp(ifindex)
        if is_ours(found.generic if generic else found.native):
            with self._present(ifindex, generic=generic) as present:
                self._links.set_xdp(ifindex, -1, generic=generic, instead_of=present)

    @contextmanager
    def _present(self, ifindex: int, *, generic: bool) -> Iterator[int | None]:
        """Open our attached dispatcher; None without a program. Raises NetlinkError for a foreign one."""
        found = self._links.xdp(ifindex)
        number = found.generic if generic else found.native
        if not number:
            yield None
            return
        if not is_ours(number):
            raise NetlinkError(
                errno.EBUSY, f"attach XDP to link {ifindex}", "it already has another XDP program"
            )
        descriptor = program_by_id(number)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def is_ours(program: int) -> bool:
    """Return whether a program is a dispatcher of ours, by its name."""
    return bool(program) and program_name(program) == XDP_DISPATCHER


# Programs of native devices without Ethernet headers: wireguard, tun, ipip.

L3_OBJECT: Final = PACKAGED_OBJECTS / "l3.o"


class L3Programs:
    """The two programs in hive_l3_entry, loaded only if a device needs them.

    Methods are for a worker thread.
    """

    def __init__(self, settings: DatapathSettings, maps: Maps) -> None:
        self._settings = settings
        self._maps = maps
        self.programs: MappingProxyType[str, int] = MappingProxyType({})
        """Kernel ids by name."""

    @property
    def needed(self) -> bool:
        """Whether this or an earlier agent activated them."""
        if self.programs:
            return True
        with map_by_id(self._maps.l3_entry.id) as entry:
            return bool(active_program_ids(entry, L3_ENTRIES))

    def activate(self, tables: tuple[Map, ...], data: bytes, generation: int) -> None:
        """Load and enter them, unless they are active already. Raises LoadError and BpfError."""
        with map_by_id(self._maps.l3_entry.id, writable=True) as entry:
            load_and_publish(entry, L3_ENTRIES, data, L3_OBJECT.name, tables, generation, self._settings)
            self.programs = MappingProxyType(active_program_ids(entry, L3_ENTRIES))

    def missing(self) -> list[str]:
        """Return the names of programs that are no longer entered."""
        if not self.programs:
            return []
        with map_by_id(self._maps.l3_entry.id) as entry:
            now = active_program_ids(entry, L3_ENTRIES)
        return [name for name, number in self.programs.items() if now.get(name) != number]
