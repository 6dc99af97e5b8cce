"""What Cilium's own agent leaves in force on a node that is moved to ours: its programs, until ours serve.

Source: Cilium 1.17: from Linux 6.6 on its programs are attached by tcx, by links pinned below
        ``<bpf-root>/cilium/{endpoints,devices}/*/links``, before that as filters; their tail calls are pinned
        beside the maps. tcx runs before filters (kernel: include/net/tcx.h), so what stays there hides ours.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cells.maps.bpf import detach as detach_link
from cells.maps.bpf import linked_device, open_link, program_name
from cells.netlink.links import HostLinks

_PINS: Final = ("endpoints", "devices")
_CALLS: Final = ("cilium_call_policy", "cilium_egresscall_policy")
_CALLS_OF_ONE: Final = ("cilium_calls_", "cilium_policy_v2_")
_FILTERS: Final = "cil_"
"""How the names of Cilium's programs begin."""


class CiliumPrograms:
    """The programs of Cilium's agent, by the interface they are attached to. For the event loop only."""

    def __init__(self, programs: Path, tables: Path, links: HostLinks) -> None:
        self._programs = programs
        self._tables = tables
        self._links = links
        self._found: dict[int, list[Path]] = defaultdict(list)
        for path in sorted(path for kind in _PINS for path in programs.glob(f"{kind}/*/links/*")):
            self._found[_device(path)].append(path)
        self.there = bool(self._found) or any(self._calls())
        """Whether Cilium's agent left anything."""

    def release(self, ifindex: int, ours: Collection[int]) -> None:
        """Take Cilium's programs off an interface; those with kernel ids in ``ours`` stay.

        Raises BpfError, NetlinkError; again is harmless.
        """
        if not self.there:
            return
        for path in list(self._found.get(ifindex, ())):
            _detach(path)
            self._found[ifindex].remove(path)
        found = self._links.programs(ifindex)
        self._links.detach(
            ifindex, ingress=_is_cilium(found.ingress, ours), egress=_is_cilium(found.egress, ours)
        )

    def release_all(self, ours: Collection[int], keep: Collection[int]) -> list[str]:
        """Take them off every interface but those of ``keep``; the names of the pins that went.

        Where some stay the tail calls stay too, which they need. Raises BpfError, NetlinkError, OSError.
        """
        if not self.there:
            return []
        released = []
        for ifindex in {*self._found, *(link.ifindex for link in self._links.links())}.difference(keep):
            released += [str(path) for path in self._found.get(ifindex, ())]
            self.release(ifindex, ours)
        if not any(self._found.values()) and not keep:
            for path in list(self._calls()):
                path.unlink(missing_ok=True)
                released.append(str(path))
            self.there = False
        for kind in _PINS:
            _remove_empty(self._programs / kind)
        return released

    def _calls(self) -> Iterator[Path]:
        if self._tables.is_dir():
            for path in self._tables.iterdir():
                if path.name in _CALLS or path.name.startswith(_CALLS_OF_ONE):
                    yield path


def _device(path: Path) -> int:
    """Index of the interface that the pinned link is at; 0 where it does not exist, or is of another kind."""
    link = open_link(path)
    try:
        return linked_device(link)
    finally:
        os.close(link)


def _detach(path: Path) -> None:
    """At once: the kernel would do it some time after the pin went."""
    link = open_link(path)
    try:
        if linked_device(link):
            detach_link(link)
    finally:
        os.close(link)
    path.unlink(missing_ok=True)


def _is_cilium(program: int, ours: Collection[int]) -> bool:
    """Whether a filter's program is Cilium's, by its name, and not one of ours, which are called alike."""
    if not program or program in ours:
        return False
    name = program_name(program)
    return name is not None and name.startswith(_FILTERS)


def _remove_empty(directory: Path) -> None:
    """Remove the directories that nothing is left in, the inner ones first."""
    for path in sorted([directory, *directory.rglob("*")], reverse=True):
        if path.is_dir():
            with suppress(OSError):
                path.rmdir()
