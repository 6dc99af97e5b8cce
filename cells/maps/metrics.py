"""Metrics of the node's maps and of all BPF maps and programs of the system, as Cilium exports them.

Source: Cilium 1.17, cilium_bpf_map_ops_total, cilium_bpf_map_pressure, cilium_bpf_map_capacity,
cilium_bpf_maps and others. The conntrack cell exports the pressure of the conntrack and NAT maps.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread

from cells.base.metrics import MetricFamily, counter, gauge, histogram
from cells.maps.bpf import BpfError, buffer, command
from cells.maps.map import Map, map_by_id
from cells.maps.map_log import SYSCALLS
from cells.maps.node_maps import Maps
from cells.maps.policy_map import PolicyMap
from cells.maps.policy_maps import PolicyMaps

# Number and memory of all BPF maps and programs on the system.
#
# Source: include/uapi/linux/bpf.h (BPF_MAP_GET_NEXT_ID and others); the memory is ``memlock`` of
#         /proc/self/fdinfo, as bpftool shows it.

PROG_NEXT_ID: Final = 11
MAP_NEXT_ID: Final = 12
PROG_FD_BY_ID: Final = 13
MAP_FD_BY_ID: Final = 14

_ID = struct.Struct("<III")  # start or id, next_id, open_flags


class Loaded(NamedTuple):
    """Number and memory of all BPF maps, or of all programs."""

    number: int
    memory: int
    """Bytes that the kernel charges for them."""


def loaded_maps() -> Loaded:
    """Measure all maps of the system, in about 10 µs each."""
    return _all(MAP_NEXT_ID, MAP_FD_BY_ID)


def loaded_programs() -> Loaded:
    """Measure all programs of the system."""
    return _all(PROG_NEXT_ID, PROG_FD_BY_ID)


def _all(next_id: int, fd_by_id: int) -> Loaded:
    sizes = [size for each in _ids(next_id) if (size := _memory(fd_by_id, each)) is not None]
    return Loaded(len(sizes), sum(sizes))


def _ids(next_id: int) -> Iterator[int]:
    attr = buffer(_ID.pack(0, 0, 0))
    while True:
        try:
            command(next_id, attr, "list", "BPF objects")
        except BpfError as error:
            if error.errno != errno.ENOENT:
                raise
            return
        found = _ID.unpack(attr.raw)[1]
        yield found
        attr = buffer(_ID.pack(found, 0, 0))


def _memory(fd_by_id: int, object_id: int) -> int | None:
    """Return the bytes that the kernel charges for an object; None if it was freed in the meantime."""
    try:
        fd = command(fd_by_id, buffer(_ID.pack(object_id, 0, 0)), "open", f"BPF object id {object_id}")
    except BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    finally:
        os.close(fd)
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("memlock:")), 0)


_PREFIX: Final = "cilium_"
_POLICY: Final = "policy"
"""Label of all policy maps together."""
_DEFAULT_CAPACITY: Final = 65536
_LOWEST_PRESSURE: Final = 0.1
"""Policy maps that are less full are not exported."""


async def families(maps: Maps, policies: PolicyMaps, one: anyio.CapacityLimiter) -> list[MetricFamily]:
    """Return the metrics of maps; large maps are counted in a thread, limited by ``one``.

    The limit keeps concurrent scrapes from competing with the event loop for the interpreter.
    """
    services = (maps.services4, maps.services6, maps.backends4, maps.backends6, maps.affinity_match)
    translations = (maps.reverse_nat4, maps.reverse_nat6, maps.source_range4, maps.source_range6)
    counted = (maps.lxc, maps.ipcache, *services, *translations)
    ids = {table.spec.name: table.id for table in counted if table.spec.name not in maps.unused}
    pressure, all_maps, all_programs = await anyio.to_thread.run_sync(
        lambda: (_pressure(ids), loaded_maps(), loaded_programs()), limiter=one
    )
    fullest = _fullest(policies.all())
    if fullest > _LOWEST_PRESSURE:
        pressure[f"{_POLICY}_*"] = fullest
    tables = [(table.spec.name.removeprefix(_PREFIX), table) for table in maps.used()]
    tables += [(_POLICY, policy.map) for policy in policies.all()]
    return [
        counter(
            "cilium_bpf_map_ops_total",
            "Number of operations on map, tagged by map name, operation and outcome",
            operations(tables),
            "map_name operation outcome",
        ),
        gauge(
            "cilium_bpf_map_capacity",
            "Capacity of map, tagged by map group. All maps with a capacity of 65536 are grouped as default",
            capacities(tables),
            "map_group",
        ),
        gauge(
            "cilium_bpf_map_pressure",
            "Fill percentage of map, tagged by map name",
            pressure,
            "map_name",
            fixed=True,
        ),
        histogram(
            SYSCALLS,
            "Duration of BPF system calls",
            dict(maps.syscalls.took) if maps.syscalls is not None else {},
            "operation outcome",
            on=False,
        ),
        *_loaded_families("maps", all_maps),
        *_loaded_families("progs", all_programs),
    ]


def operations(tables: Iterable[tuple[str, Map]]) -> dict[tuple[str, str, str], int]:
    """Return the agent's updates and deletes by map and outcome, without zeros."""
    done: Counter[tuple[str, str, str]] = Counter()
    for name, table in tables:
        done[name, "update", "success"] += table.updates
        done[name, "update", "fail"] += table.failed_updates
        done[name, "delete", "success"] += table.deletes
        done[name, "delete", "fail"] += table.failed_deletes
    return {what: count for what, count in done.items() if count}


def capacities(tables: Iterable[tuple[str, Map]]) -> dict[str, int]:
    """Return the capacity of each map; those with the default capacity share one value."""
    by_name = {
        name if name == _POLICY or name.startswith("hive_") else _PREFIX + name: table.spec.max_entries
        for name, table in tables
    }
    unusual = {name: capacity for name, capacity in by_name.items() if capacity != _DEFAULT_CAPACITY}
    return {"default": _DEFAULT_CAPACITY, **unusual}


def _pressure(ids: Mapping[str, int]) -> dict[str, float]:
    """Return the fill ratio of each map, 0 to 1, without empty ones."""
    full: dict[str, float] = {}
    for name, each in ids.items():
        with map_by_id(each, name) as table:
            count = sum(1 for _ in table.items())
            if count:
                full[name.removeprefix(_PREFIX)] = count / table.spec.max_entries
    return full


def _fullest(policies: Iterable[PolicyMap]) -> float:
    return max((policy.entries / policy.map.spec.max_entries for policy in policies), default=0.0)


def _loaded_families(kind: str, found: Loaded) -> Iterator[MetricFamily]:
    what = {"maps": "maps", "progs": "programs"}[kind]
    yield gauge(f"cilium_bpf_{kind}", f"Total count of BPF {what}", found.number, fixed=True)
    yield gauge(
        f"cilium_bpf_{kind}_virtual_memory_max_bytes",
        f"BPF {what} kernel max memory usage size in bytes",
        found.memory,
        fixed=True,
    )
