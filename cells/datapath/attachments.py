"""The programs attached to interfaces: loaded once, pinned, and reused while the package's are the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from cells.datapath.generation import enter, ids_in_force
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
    """Open descriptors of the dispatchers. ``stale``: interfaces still have others."""

    def __init__(self, descriptors: Mapping[str, int], *, stale: bool) -> None:
        self.descriptors = dict(descriptors)
        self.stale = stale

    @classmethod
    def load(cls, data: bytes, name: str, tables: Collection[Map], pins: Path) -> Self:
        """The pinned dispatchers if they are these very programs on these very maps, else these; LoadError.

        New ones are not pinned yet: pins say what interfaces have, so :meth:`settle` comes after attaching.
        """
        unpin_unfinished(pins, DISPATCHERS)
        with LoadedObject(data, name) as loaded:
            loaded.use_maps({table.spec.name: table.fd for table in tables})
            loaded.load()
            loaded.expect(DISPATCHERS)
            fresh = loaded.programs()
            pinned = open_pinned(pins)
            if all(program in pinned and same(pinned[program], fresh[program]) for program in DISPATCHERS):
                return cls(pinned, stale=False)
            close_all(pinned.values())
            return cls({program: os.dup(fresh[program]) for program in DISPATCHERS}, stale=True)

    def settle(self, pins: Path) -> None:
        """Note that every interface has these now."""
        pins.mkdir(parents=True, exist_ok=True)
        for name, descriptor in self.descriptors.items():
            replace_pin(descriptor, pins / name)
        self.stale = False

    def unpinned(self, pins: Path) -> list[str]:
        """Names of those that are not pinned, or with another program in place of their pin."""
        pinned = open_pinned(pins)
        try:
            return [
                name
                for name, descriptor in self.descriptors.items()
                if name not in pinned or program_info(pinned[name]).id != program_info(descriptor).id
            ]
        finally:
            close_all(pinned.values())

    def describe(self) -> dict[str, ProgramInfo]:
        """The programs by name."""
        return {name: program_info(descriptor) for name, descriptor in self.descriptors.items()}

    def close(self) -> None:
        """Give up the descriptors; pinned and attached programs go on."""
        close_all(self.descriptors.values())
        self.descriptors.clear()


def open_pinned(pins: Path) -> dict[str, int]:
    """Descriptors of the dispatchers that are pinned."""
    found = {}
    for name in DISPATCHERS:
        try:
            found[name] = open_program(pins / name)
        except BpfError:  # none there, or not a program: it will be replaced
            continue
    return found


def same(old: int, new: int) -> bool:
    """Whether two programs have the same instructions and the same maps."""
    was, is_ = program_info(old), program_info(new)
    return (was.tag, was.name, set(was.map_ids)) == (is_.tag, is_.name, set(is_.map_ids))


def close_all(descriptors: Collection[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


# The programs in devices' drivers (XDP), which serve clients outside before the stack sees their packets.
#
# Source: net/core/dev.c (dev_change_xdp_fd), linux/if_link.h (XDP_FLAGS_*).

XDP_OBJECT: Final = PACKAGED_OBJECTS / "xdp.o"
_SLOT: Final = bytes(4)


class Drivers:
    """One program for all devices; a dispatcher of its own is attached to each and jumps to it."""

    def __init__(self, settings: DatapathSettings, maps: Maps, links: HostLinks) -> None:
        self._settings = settings
        self._maps = maps
        self._links = links
        self._programs: MappingProxyType[str, int] = MappingProxyType({})

    def put_in_force(self, tables: tuple[Map, ...], data: bytes, generation: int) -> None:
        """Load the program and enter it, unless it is there; none without acceleration. For a worker thread.

        Raises LoadError and BpfError.
        """
        with map_by_id(self._maps.xdp_entry.id, writable=True) as entry:
            if self._settings.accelerates:
                enter(entry, XDP_ENTRIES, data, XDP_OBJECT.name, tables, generation, self._settings)
            else:
                entry.delete(_SLOT)
            self._programs = MappingProxyType(ids_in_force(entry, XDP_ENTRIES))

    def missing(self) -> list[str]:
        """Names of programs that are no longer in force. For a worker thread."""
        with map_by_id(self._maps.xdp_entry.id) as entry:
            now = ids_in_force(entry, XDP_ENTRIES)
        return [name for name, number in self._programs.items() if now.get(name) != number]

    @property
    def programs(self) -> MappingProxyType[str, int]:
        """Kernel ids by name; none without acceleration."""
        return self._programs

    def attach(self, ifindex: int, dispatcher: int) -> bool:
        """Attach to a device, in the place of an older one of ours; False if it cannot, and need not.

        Raises NetlinkError: it has to, and cannot, or it has another program.
        """
        generic = self._settings.generic_xdp
        try:
            self._detach(ifindex, generic=not generic)  # a link cannot have both
            with self._present(ifindex, generic=generic) as present:
                if present is None or program_info(present).id != program_info(dispatcher).id:
                    self._links.set_xdp(ifindex, dispatcher, generic=generic, instead_of=present)
        except NetlinkError as error:
            if self._settings.bpf_lb_acceleration == "best-effort" and error.errno != errno.ENODEV:
                return False
            raise
        return True

    def detach(self, ifindex: int) -> None:
        """Take ours off a device. Raises NetlinkError."""
        for generic in (False, True):
            self._detach(ifindex, generic=generic)

    def serves(self, ifindex: int, dispatcher: int) -> bool:
        """Whether the dispatcher, by its kernel id, is attached as it should be. Raises NetlinkError."""
        found = self._links.xdp(ifindex)
        return (found.generic if self._settings.generic_xdp else found.native) == dispatcher

    def has_any(self, ifindex: int) -> bool:
        """Whether one of ours, of whichever age, is attached. Raises NetlinkError."""
        return any(map(is_ours, self._links.xdp(ifindex)))

    def _detach(self, ifindex: int, *, generic: bool) -> None:
        found = self._links.xdp(ifindex)
        if is_ours(found.generic if generic else found.native):
            with self._present(ifindex, generic=generic) as present:
                self._links.set_xdp(ifindex, -1, generic=generic, instead_of=present)

    @contextmanager
    def _present(self, ifindex: int, *, generic: bool) -> Iterator[int | None]:
        """A descriptor of ours that is attached, None if nothing is. NetlinkError if something else is."""
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
    """Whether the program with that kernel id is a dispatcher of ours, by its name."""
    return bool(program) and program_name(program) == XDP_DISPATCHER


# The programs of native devices without Ethernet headers: wireguard, tun, ipip.

L3_OBJECT: Final = PACKAGED_OBJECTS / "l3.o"


class L3Programs:
    """Both, in hive_l3_entry; none before they are needed. All but ``programs`` is for a worker thread."""

    def __init__(self, settings: DatapathSettings, maps: Maps) -> None:
        self._settings = settings
        self._maps = maps
        self.programs: MappingProxyType[str, int] = MappingProxyType({})
        """Kernel ids by name."""

    @property
    def needed(self) -> bool:
        """Whether they are in force, here or for an agent before."""
        if self.programs:
            return True
        with map_by_id(self._maps.l3_entry.id) as entry:
            return bool(ids_in_force(entry, L3_ENTRIES))

    def put_in_force(self, tables: tuple[Map, ...], data: bytes, generation: int) -> None:
        """Load and enter them, unless they are. Raises LoadError and BpfError."""
        with map_by_id(self._maps.l3_entry.id, writable=True) as entry:
            enter(entry, L3_ENTRIES, data, L3_OBJECT.name, tables, generation, self._settings)
            self.programs = MappingProxyType(ids_in_force(entry, L3_ENTRIES))

    def missing(self) -> list[str]:
        """Names of programs that are no longer in force."""
        if not self.programs:
            return []
        with map_by_id(self._maps.l3_entry.id) as entry:
            now = ids_in_force(entry, L3_ENTRIES)
        return [name for name, number in self.programs.items() if now.get(name) != number]
