"""Map operations against the real kernel."""

import errno
import struct
from pathlib import Path

import pytest

from cells.maps.bpf import BpfError, PackedColumn, pin, replace_pin, unpin
from cells.maps.map import (
    NO_PREALLOC,
    NOEXIST,
    Map,
    MapSpec,
    MapType,
    create_map,
    map_by_id,
    open_map,
    possible_cpus,
)
from tests.support.namespaces import in_node, need_root

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

BPFFS = Path("/sys/fs/bpf")
POLICY = MapSpec("hive_test_lpm", MapType.LPM_TRIE, 12, 24, 1000, NO_PREALLOC)


@pytest.fixture(autouse=True)
def _root() -> None:
    need_root()


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def hash_map(max_entries: int = 16) -> Map:
    return create_map(MapSpec("hive_test", MapType.HASH, 4, 8, max_entries, NO_PREALLOC))


def test_elements_are_set_read_and_removed() -> None:
    with hash_map() as table:
        assert table.lookup(u32(1)) is None
        table.update(u32(1), b"one\0\0\0\0\0")
        table.update(u32(1), b"uno\0\0\0\0\0")
        assert table.lookup(u32(1)) == b"uno\0\0\0\0\0"
        with pytest.raises(BpfError, match=r"map hive_test of 16 entries: File exists \(EEXIST\)"):
            table.update(u32(1), bytes(8), NOEXIST)
        assert table.first_key() == u32(1)
        assert table.delete(u32(1)) is True
        assert table.delete(u32(1)) is False
        assert table.first_key() is None


def test_a_key_of_the_wrong_size_is_refused_before_the_kernel_sees_it() -> None:
    with hash_map() as table:
        message = r"map hive_test: wrong size of key or value \(3/8 bytes\): keys have 4, values 8 bytes"
        with pytest.raises(ValueError, match=message):
            table.update(b"abc", bytes(8))
        with pytest.raises(ValueError, match="wrong size"):
            table.lookup(b"abcde")
        with pytest.raises(ValueError, match="wrong size"):
            table.update_batch([(b"abcd", b"1")])


def test_a_write_to_a_full_map_raises_map_full() -> None:
    with hash_map(1) as table:
        table.update(u32(1), bytes(8))
        with pytest.raises(BpfError, match=r"cannot update map hive_test of 1 entries: it is full \(E2BIG\)"):
            table.update(u32(2), bytes(8))


def test_a_map_opened_by_its_id_is_read_unless_asked_otherwise() -> None:
    with hash_map() as table:
        table.update(u32(1), bytes(8))
        with map_by_id(table.id) as again, table.reopened() as other:
            for each in (again, other):
                assert list(each.items()) == [(u32(1), bytes(8))]
                assert each.lookup(u32(1)) == bytes(8)
                with pytest.raises(BpfError, match="EPERM"):
                    each.update(u32(1), b"changed!")
                with pytest.raises(BpfError, match="EPERM"):
                    each.delete(u32(1))
                with pytest.raises(BpfError, match="EPERM"):
                    each.update_batch([(u32(1), b"changed!")])
                with pytest.raises(BpfError, match="EPERM"):
                    each.delete_batch([u32(1)])
        with map_by_id(table.id, writable=True) as own:
            assert own.delete(u32(1))


def test_use_of_a_closed_map_raises_an_error() -> None:
    table = hash_map()
    table.close()
    table.close()
    with pytest.raises(BpfError, match="EBADF"):
        table.lookup(u32(1))
    with pytest.raises(BpfError, match="EBADF"):
        list(table.items())
    with pytest.raises(BpfError, match="EBADF"):
        table.first_key()


def test_entries_are_set_from_packed_columns_of_keys_and_values() -> None:
    with create_map(MapSpec("packed", MapType.HASH, 4, 8, 16)) as table:
        table.update_all(PackedColumn(u32(1) + u32(2), 4), PackedColumn(b"firstrowtheother", 8))
        assert dict(table.items()) == {u32(1): b"firstrow", u32(2): b"theother"}
        with pytest.raises(ValueError, match="wrong size"):
            table.update_all(PackedColumn(u32(1) + u32(2), 4), PackedColumn(bytes(12), 6))


def test_batches_carry_more_than_one_chunk() -> None:
    entries = {u32(i): struct.pack("<Q", i * i) for i in range(10_000)}
    with hash_map(10_000) as table:
        table.update_batch(list(entries.items()))
        assert dict(table.items()) == entries
        table.delete_batch([u32(i) for i in range(9_990)])
        assert dict(table.items()) == {u32(i): struct.pack("<Q", i * i) for i in range(9_990, 10_000)}
        assert table.clear() == 10
        assert list(table.items()) == []


@pytest.mark.parametrize("kind", [MapType.HASH, MapType.LRU_HASH, MapType.ARRAY])
def test_items_reads_every_kind_of_table(kind: MapType) -> None:
    with create_map(MapSpec("hive_test", kind, 4, 4, 8)) as table:
        for i in range(8):
            table.update(u32(i), u32(i + 100))
        assert dict(table.items()) == {u32(i): u32(i + 100) for i in range(8)}


def test_a_longest_prefix_map_is_read_whole() -> None:
    entries = {struct.pack("<II", 32 + i, 0) + u32(i).rjust(4): bytes([i]) * 24 for i in range(8)}
    with create_map(POLICY) as table:
        table.update_batch(list(entries.items()))
        assert len(dict(table.items())) == len(entries)
        assert table.clear() == len(entries)


def test_per_cpu_values_come_one_for_each_possible_cpu() -> None:
    with create_map(MapSpec("hive_test", MapType.PERCPU_HASH, 8, 12, 4, NO_PREALLOC)) as table:
        padded = b"".join((bytes([cpu + 1]) * 12).ljust(16, b"\0") for cpu in range(possible_cpus()))
        table.update(bytes(8), padded)
        assert table.lookup(bytes(8)) == padded
        assert list(table.items()) == [(bytes(8), padded)]


def test_a_map_of_maps_reads_as_map_ids() -> None:
    outer = MapSpec("hive_test_outer", MapType.ARRAY_OF_MAPS, 4, 4, 64, inner=POLICY)
    with create_map(outer) as policies, create_map(POLICY) as one, create_map(POLICY) as two:
        policies.update(u32(3), u32(one.fd))
        policies.update_batch([(u32(3), u32(one.fd)), (u32(60), u32(two.fd))])
        assert dict(policies.items()) == {u32(3): u32(one.id), u32(60): u32(two.id)}
        two.update(struct.pack("<II", 64, 1) + bytes(4), b"x" * 24)
        with map_by_id(two.id) as again:
            assert again.spec.same_as(POLICY)
            assert len(list(again.items())) == 1


def test_a_prog_array_reads_as_empty() -> None:
    with create_map(MapSpec("hive_test", MapType.PROG_ARRAY, 4, 4, 8)) as calls:
        assert list(calls.items()) == []


def test_pins_keep_a_map_and_are_replaced_at_once(in_node: None) -> None:
    path = BPFFS / "hive_test"
    with hash_map() as table:
        pin(table.fd, path)
        with pytest.raises(BpfError, match=f"cannot pin {path}: File exists"):
            pin(table.fd, path)
        table.update(u32(1), b"survives")
    with open_map(path) as again, hash_map() as fresh:
        assert again.lookup(u32(1)) == b"survives"
        assert (again.id, again.spec.name) == (table.id, "hive_test")
        replace_pin(fresh.fd, path)
        with open_map(path) as now:
            assert now.id == fresh.id
    assert [name for name in BPFFS.iterdir() if name.suffix != ".debug"] == [path]
    assert unpin(path) is True
    assert unpin(path) is False
    with pytest.raises(BpfError) as missing:
        open_map(path)
    assert missing.value.errno == errno.ENOENT


def test_creation_that_fails_names_the_map() -> None:
    with pytest.raises(BpfError, match=r"cannot create map hive_test \(lpm_trie key 12 B .*EINVAL"):
        create_map(MapSpec("hive_test", MapType.LPM_TRIE, 12, 24, 1000))  # a trie must not be preallocated
