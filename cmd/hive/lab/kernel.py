"""List a node's BPF maps, programs, map entries and links, and whether they still exist after its removal.

bpf_objects() and pod_resources() run in forked children inside a node, alive() on the machine.
"""

import ctypes
import errno
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cells.maps.bpf import open_program, program_by_id, program_info
from cells.maps.map import MapType, open_map

BPF_ROOT = Path("/sys/fs/bpf")
STATE = Path("/run/cilium/state")
ENTRY_MAP = "hive_entry"
ROWS = ("cilium_lxc", "cilium_ipcache", "hive_endpoints")
"""Maps with an entry for every pod."""
DISPATCH = "dispatch"
"""Directory of the pins of attached programs and links."""
LAB_LINKS = re.compile(r"lxc.+|cilium_.+|uplink|node(-\d+)?|segment-\d+")
"""Name prefixes of the links that a lab and its agents create."""
GENERATION = "hive_calls_"
"""Pins that belong to one generation of the datapath, and are replaced with it."""


@dataclass(frozen=True, slots=True)
class BPFObjects:
    """The BPF objects of a node: ids of maps and programs by pin, and of entry programs by index."""

    maps: dict[str, int] = field(default_factory=dict)
    programs: dict[str, int] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    map_ids: frozenset[int] = frozenset()
    """All maps, including those that only programs reference."""

    @property
    def program_ids(self) -> frozenset[int]:
        """Return the ids of all pinned programs and entry programs."""
        return frozenset(self.programs.values()) | frozenset(self.entries.values())

    @property
    def dispatchers(self) -> dict[str, int]:
        """Return the programs attached to links, which stay when the datapath is replaced."""
        return {pin: id_ for pin, id_ in self.programs.items() if Path(pin).parent.name == DISPATCH}

    @property
    def persistent_maps(self) -> dict[str, int]:
        """Return the maps that stay when the datapath is replaced."""
        return {pin: id_ for pin, id_ in self.maps.items() if not Path(pin).name.startswith(GENERATION)}


@dataclass(frozen=True, slots=True)
class PodResources:
    """State that grows with every pod: host links, map entries, pins of maps, saved endpoints."""

    links: frozenset[str]
    rows: frozenset[tuple[str, bytes]]
    pins: frozenset[str]
    state: frozenset[str]

    def added_since(self, other: "PodResources") -> list[str]:
        """Describe what exists here but not in ``other``."""
        return [
            *(f"link {name}" for name in sorted(self.links - other.links)),
            *(f"row {key.hex()} of {name}" for name, key in sorted(self.rows - other.rows)),
            *(f"pin {name}" for name in sorted(self.pins - other.pins)),
            *(f"state {name}" for name in sorted(self.state - other.state)),
        ]


def bpf_objects(root: Path = BPF_ROOT) -> BPFObjects:
    """Return the BPF objects pinned below ``root``."""
    maps: dict[str, int] = {}
    programs: dict[str, int] = {}
    entries: dict[int, int] = {}
    map_ids: set[int] = set()
    for pin, kind in _pins(root):
        name = str(pin.relative_to(root))
        if kind == "bpf-map":
            with open_map(pin) as bpf_map:
                maps[name] = bpf_map.id
                if pin.name == ENTRY_MAP:
                    entries = {_u32(index): _u32(program) for index, program in bpf_map.items()}
                elif bpf_map.spec.type == MapType.ARRAY_OF_MAPS:
                    map_ids.update(_u32(inner) for _, inner in bpf_map.items())
        elif kind == "bpf-prog":
            programs[name] = _program(open_program(pin), map_ids)
    for program in entries.values():
        _program(program_by_id(program), map_ids)
    return BPFObjects(maps, programs, entries, frozenset(map_ids) | frozenset(maps.values()))


def pod_resources(root: Path = BPF_ROOT) -> PodResources:
    """Return the node's state that comes and goes with pods."""
    rows: set[tuple[str, bytes]] = set()
    pins: set[str] = set()
    for pin, kind in _pins(root):
        if kind == "bpf-map" and not pin.name.startswith(GENERATION):
            pins.add(pin.name)
        if pin.name in ROWS:
            with open_map(pin) as bpf_map:
                rows.update((pin.name, key) for key, _ in bpf_map.items())
    state = {entry.name for entry in STATE.iterdir() if entry.is_dir()} if STATE.exists() else set()
    return PodResources(machine_links(), frozenset(rows), frozenset(pins), frozenset(state))


def machine_links() -> frozenset[str]:
    """Return the names of the links in the caller's network namespace."""
    return frozenset(name for _, name in socket.if_nameindex())


def lab_links() -> frozenset[str]:
    """Return the names of links in the caller's network namespace that a lab or its agents created."""
    return frozenset(name for name in machine_links() if LAB_LINKS.fullmatch(name))


def alive(maps: Iterable[int], programs: Iterable[int]) -> list[str]:
    """Describe the BPF objects of these ids that still exist on the machine.

    Ids are only listed, not opened: a prog array that a process opens and closes while the kernel clears it
    leaks for good (kernel/bpf/arraymap.c: prog_array_map_clear() takes a reference for work that may be
    queued already).
    """
    libbpf = ctypes.CDLL("libbpf.so.1")
    return [
        *(f"map {id_}" for id_ in sorted(maps) if _exists(libbpf.bpf_map_get_next_id, id_)),
        *(f"program {id_}" for id_ in sorted(programs) if _exists(libbpf.bpf_prog_get_next_id, id_)),
    ]


def _exists(get_next_id: Callable[..., int], id_: int) -> bool:
    following = ctypes.c_uint32()
    error = get_next_id(ctypes.c_uint32(id_ - 1), ctypes.byref(following))
    if error not in {0, -errno.ENOENT}:
        raise OSError(-error, f"cannot list BPF ids: {os.strerror(-error)}")
    return error == 0 and following.value == id_


def _pins(root: Path) -> Iterator[tuple[Path, str]]:
    """Return every pin below ``root`` with its type: ``bpf-map``, ``bpf-prog`` or ``bpf_link``."""
    for pin in sorted(root.rglob("*")):
        if not pin.is_file() or pin.suffix == ".debug":  # the kernel's own text files
            continue
        fd = open_program(pin)  # opens whatever is pinned
        try:
            kind = Path(f"/proc/self/fd/{fd}").readlink()
        finally:
            os.close(fd)
        yield pin, str(kind).removeprefix("anon_inode:")


def _program(fd: int, map_ids: set[int]) -> int:
    try:
        info = program_info(fd)
    finally:
        os.close(fd)
    map_ids.update(info.map_ids)
    return info.id


def _u32(data: bytes) -> int:
    (number,) = struct.unpack("=I", data)
    return int(number)
