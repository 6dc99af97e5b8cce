"""The programs attached to interfaces: loaded once, pinned, and kept while the package's are the same.

For:    Datapath. Needs: libbpf, cells.maps, a directory on bpffs. Gives: Dispatchers.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Self

from cells.datapath.libbpf import LoadedObject
from cells.datapath.programs import DISPATCHERS
from cells.maps import BpfError, Map, ProgramInfo, open_program, program_info, replace_pin, unpin_unfinished


class Dispatchers:
    """Open descriptors of the dispatchers. ``stale`` says that interfaces still have others."""

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
        """Names of those that are not pinned, or behind whose pin is another program."""
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
