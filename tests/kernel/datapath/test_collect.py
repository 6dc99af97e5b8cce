"""The program that removes ended connections: what it takes, what it leaves, what it counts."""

import ctypes
import struct
import time
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cells.datapath.build import compile_objects
from cells.datapath.libbpf import LoadedObject
from cells.maps import CtEntry, CtKey, Map
from cells.maps.bpf import buffer, command, sleeping
from cells.maps.programs import PROG_TEST_RUN
from tests.kernel.datapath.world import World

pytestmark = pytest.mark.kernel

RUN = struct.Struct("<IIIIQQIIIIQQIII")
COUNTS = struct.Struct("<IIII")


def collect(fd: int) -> list[tuple[int, ...]]:
    """Run the program once: seen, alive, deleted and 0 of the TCP table, then of the other."""
    context = buffer(bytes(2 * COUNTS.size))
    size, at = len(context.raw), ctypes.addressof(context)
    attr = buffer(RUN.pack(fd, 0, 0, 0, 0, 0, 0, 0, size, 0, at, 0, 0, 0, 0))
    command(PROG_TEST_RUN, attr, "run", "hive_ct_gc", call=sleeping)
    assert RUN.unpack(attr.raw)[1] == 0
    return list(COUNTS.iter_unpack(context.raw[: 2 * COUNTS.size]))


def fill(table: Map, protocol: int, count: int, lifetime: int) -> list[bytes]:
    """Enter connections of distinct ports, told apart by when they end; their keys."""
    ends = IPv4Address("10.1.0.10"), IPv4Address("10.1.0.11")
    keys = [CtKey(*ends, 80, (lifetime % 1000) * 40 + n, protocol).pack() for n in range(count)]
    for key in keys:
        table.update(key, CtEntry(lifetime=lifetime).pack())
    return keys


def test_only_what_has_ended_is_removed(world: World, tmp_path: Path) -> None:
    now = int(time.monotonic())
    tcp, other = world.maps["cilium_ct4_global"], world.maps["cilium_ct_any4_global"]
    kept = fill(tcp, 6, 20, now + 500)
    gone = fill(tcp, 6, 30, now - 2)
    fill(other, 17, 5, now - 2)
    data = next(path for path in compile_objects(tmp_path) if path.name == "gc.o").read_bytes()
    with LoadedObject(data, "gc.o") as loaded:
        loaded.use_maps({name: world.maps[name].fd for name in loaded.tables})
        loaded.load()
        program = loaded.programs()["hive_ct_gc"]
        assert collect(program) == [(50, 20, 30, 0), (5, 0, 5, 0)]
        assert collect(program) == [(20, 20, 0, 0), (0, 0, 0, 0)]
    assert all(tcp.lookup(key) is not None for key in kept)
    assert all(tcp.lookup(key) is None for key in gone)
