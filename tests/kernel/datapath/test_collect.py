"""The programs that remove connections: what they take, what they leave, what they count."""

import struct
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from cells.datapath.libbpf import LoadedObject
from cells.datapath.settings import PACKAGED_OBJECTS
from cells.maps import CtEntry, CtKey, run_syscall
from tests.kernel.datapath.world import A, B, World

pytestmark = pytest.mark.kernel

TABLES = {
    "cilium_ct4_global": (A.ip, B.ip, 6),
    "cilium_ct_any4_global": (A.ip, B.ip, 17),
    "cilium_ct6_global": (A.ip6, B.ip6, 6),
    "cilium_ct_any6_global": (A.ip6, B.ip6, 17),
}
"""In the order of the program's counts."""


@pytest.fixture
def programs(world: World) -> Iterator[dict[str, int]]:
    """The programs on the world's maps."""
    with LoadedObject((PACKAGED_OBJECTS / "gc.o").read_bytes(), "gc.o") as loaded:
        loaded.use_maps({name: world.maps[name].fd for name in loaded.tables})
        loaded.load()
        yield loaded.programs()


def collect(program: int) -> list[tuple[int, ...]]:
    """Seen, alive and deleted of each table."""
    result, context = run_syscall(program, bytes(64))
    assert result == 0
    return [counts[:3] for counts in struct.iter_unpack("<IIII", context)]


def forget(program: int, *addresses: str) -> int:
    """How many flows of these addresses there were."""
    ips = [ip_address(each) for each in addresses]
    v4 = b"".join(ip.packed for ip in ips if ip.version == 4)
    v6 = b"".join(ip.packed for ip in ips if ip.version == 6)
    head = struct.pack("<IIII", len(v4) // 4, len(v6) // 16, 0, 0)
    result, context = run_syscall(program, head + v4.ljust(48 * 4, b"\0") + v6.ljust(12 * 16, b"\0"))
    assert result == 0
    return int.from_bytes(context[8:12], "little")


def fill(world: World, name: str, count: int, lifetime: int, first: int = 0) -> list[bytes]:
    """Enter connections of distinct ports; their keys."""
    source, destination, protocol = TABLES[name]
    daddr, saddr = ip_address(source), ip_address(destination)
    keys = [CtKey(daddr, saddr, 80, first + n, protocol).pack() for n in range(count)]
    for key in keys:
        world.maps[name].update(key, CtEntry(lifetime=lifetime).pack())
    return keys


def test_only_what_has_ended_is_removed(world: World, programs: dict[str, int]) -> None:
    now = int(time.monotonic())
    kept = {name: fill(world, name, 20, now + 500) for name in TABLES}
    gone = {name: fill(world, name, 30, now - 2, first=100) for name in TABLES}
    assert collect(programs["hive_ct_gc"]) == [(50, 20, 30)] * 4
    assert collect(programs["hive_ct_gc"]) == [(20, 20, 0)] * 4
    for name in TABLES:
        assert all(world.maps[name].lookup(key) is not None for key in kept[name])
        assert all(world.maps[name].lookup(key) is None for key in gone[name])


def test_flows_of_an_address_are_forgotten(world: World, programs: dict[str, int]) -> None:
    for name in TABLES:
        fill(world, name, 10, 1 << 31)
    assert forget(programs["hive_ct_forget"], "10.1.0.99", "fd00:10:1::99") == 0
    assert forget(programs["hive_ct_forget"], "10.1.0.99", A.ip) == 20
    assert forget(programs["hive_ct_forget"], "fd00:10:1::99", B.ip6) == 20
    assert collect(programs["hive_ct_gc"]) == [(0, 0, 0)] * 4
