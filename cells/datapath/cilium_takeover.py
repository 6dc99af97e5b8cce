"""Takeover from Cilium: detach its agent's programs from an interface once ours are attached.

Cilium 1.17 attaches its programs by tcx from Linux 6.6 on, with links pinned below
``<bpf-root>/cilium/{endpoints,devices}/*/links``, and before that as tc filters; its tail call maps are
pinned beside the maps. tcx programs run before filters (kernel: include/net/tcx.h), so ours do not run while
Cilium's stay.
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
"""Prefix of the names of Cilium's programs."""


class CiliumPrograms:
    """The programs of Cilium's agent, by interface. For the event loop only."""

    def __init__(self, programs: Path, tables: Path, links: HostLinks) -> None:
        self._programs = programs
        self._tables = tables
        self._links = links
        self._found: dict[int, list[Path]] = defaultdict(list)
        for path in sorted(path for kind in _PINS for path in programs.glob(f"{kind}/*/links/*")):
            self._found[_device(path)].append(path)
        self.present = bool(self._found) or any(self._calls())
        """Whether Cilium's agent left any programs."""

    def release(self, ifindex: int, ours: Collection[int]) -> None:
        """Detach Cilium's programs from an interface, except those with kernel ids in ``ours``.

        Idempotent. Raises BpfError, NetlinkError.
        """
        if not self.present:
            return
        for path in list(self._found.get(ifindex, ())):
            _detach(path)
            self._found[ifindex].remove(path)
        found = self._links.programs(ifindex)
        self._links.detach(
            ifindex, ingress=_is_cilium(found.ingress, ours), egress=_is_cilium(found.egress, ours)
        )

    def release_all(self, ours: Collection[int], keep: Collection[int]) -> list[str]:
        """Detach them from all interfaces except ``keep``; return the removed pins.

        The tail call maps stay as long as some programs stay, which need them. Raises BpfError, NetlinkError,
        OSError.
        """
        if not self.present:
            return []
        released = []
        for ifindex in {*self._found, *(link.ifindex for link in self._links.links())}.difference(keep):
            released += [str(path) for path in self._found.get(ifindex, ())]
            self.release(ifindex, ours)
        if not any(self._found.values()) and not keep:
            for path in list(self._calls()):
                path.unlink(missing_ok=True)
                released.append(str(path))
            self.present = False
        for kind in _PINS:
            _remove_empty(self._programs / kind)
        return released

    def _calls(self) -> Iterator[Path]:
        if self._tables.is_dir():
            for path in self._tables.iterdir():
                if path.name in _CALLS or path.name.startswith(_CALLS_OF_ONE):
                    yield path


def _device(path: Path) -> int:
    """Return the interface index of a pinned link; 0 if it does not exist, or for other kinds of links."""
    link = open_link(path)
    try:
        return linked_device(link)
    finally:
        os.close(link)


def _detach(path: Path) -> None:
    """Detach the link, then unpin it: after an unpin alone the kernel detaches some time later."""
    link = open_link(path)
    try:
        if linked_device(link):
            detach_link(link)
    finally:
        os.close(link)
    path.unlink(missing_ok=True)


def _is_cilium(program: int, ours: Collection[int]) -> bool:
    """Return whether a filter's program is Cilium's, by its name; ours have the same names."""
    if not program or program in ours:
        return False
    name = program_name(program)
    return name is not None and name.startswith(_FILTERS)


def _remove_empty(directory: Path) -> None:
    """Remove empty directories, the inner ones first."""
    for path in sorted([directory, *directory.rglob("*")], reverse=True):
        if path.is_dir():
            with suppress(OSError):
                path.rmdir()
