"""Metrics of kernel maps: operations, pressure, loaded objects of the system."""

from __future__ import annotations

import pytest

from cells.maps.bpf import BpfError
from cells.maps.map import MapSpec, MapType, create_map
from cells.maps.metrics import loaded_maps, loaded_programs, operations

pytestmark = pytest.mark.kernel


def test_map_operations_are_counted_singly_and_in_batches(in_node: None) -> None:
    with create_map(MapSpec("counted", MapType.HASH, 4, 8, 4)) as table:
        keys = [number.to_bytes(4, "little") for number in range(6)]
        table.update(keys[0], bytes(8))
        table.update_batch([(keys[1], bytes(8)), (keys[2], bytes(8))])
        table.update(keys[3], bytes(8))
        with pytest.raises(BpfError):
            table.update(keys[4], bytes(8))
        assert table.delete(keys[0])
        assert not table.delete(keys[5])
        table.delete_batch(keys[1:3])
        assert operations([("counted", table)]) == {
            ("counted", "update", "success"): 4,
            ("counted", "update", "fail"): 1,
            ("counted", "delete", "success"): 3,
        }


def test_everything_the_system_has_loaded_is_counted(in_node: None) -> None:
    programs = loaded_programs()
    with create_map(MapSpec("large", MapType.ARRAY, 4, 4096, 256)) as table:
        assert table.id
        after = loaded_maps()
    assert after.number >= 1
    assert after.memory >= 4096 * 256
    assert programs.number == 0 or programs.memory > 0
