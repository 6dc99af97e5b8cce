"""The programs in devices' drivers (XDP), which serve clients outside before the stack sees their packets.

Needs: DatapathSettings, Maps, HostLinks, the attached dispatcher.   Gives: Drivers.
Source: net/core/dev.c (dev_change_xdp_fd), linux/if_link.h (XDP_FLAGS_*).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from cells.datapath.generation import enter, ids_in_force
from cells.datapath.programs import XDP_DISPATCHER, XDP_ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings
from cells.maps import Map, Maps, map_by_id, program_by_id, program_info, program_name
from cells.node.netlink import HostLinks, NetlinkError

OBJECT: Final = PACKAGED_OBJECTS / "xdp.o"
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
        with map_by_id(self._maps.xdp_entry.id) as entry:
            if self._settings.accelerates:
                enter(entry, XDP_ENTRIES, data, OBJECT.name, tables, generation, self._settings)
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
