"""Metrics of maps: what was done to each, how many entries they take."""

from __future__ import annotations

from cells.maps.map import Map, MapSpec, MapType
from cells.maps.metrics import capacities, operations


def table(name: str, entries: int, *, updates: int = 0, deletes: int = 0, failed: int = 0) -> Map:
    """A map that was never opened."""
    found = Map(0xFFFFFFFF, 1, MapSpec(name, MapType.HASH, 4, 4, entries))
    found.updates, found.deletes, found.failed_updates = updates, deletes, failed
    return found


def test_operations_of_all_policy_maps_share_one_series_and_zero_ones_are_omitted() -> None:
    counts = operations(
        [
            ("lxc", table("cilium_lxc", 9, updates=3, deletes=1)),
            ("policy", table("cilium_policy_00001", 9, updates=2)),
            ("policy", table("cilium_policy_00002", 9, updates=5, failed=1)),
            ("ipcache", table("cilium_ipcache", 9)),
        ]
    )
    assert counts == {
        ("lxc", "update", "success"): 3,
        ("lxc", "delete", "success"): 1,
        ("policy", "update", "success"): 7,
        ("policy", "update", "fail"): 1,
    }


def test_maps_of_the_usual_capacity_are_one() -> None:
    sizes = capacities(
        [
            ("lxc", table("cilium_lxc", 65535)),
            ("ct4_global", table("cilium_ct4_global", 65536)),
            ("hive_endpoints", table("hive_endpoints", 4096)),
            ("policy", table("cilium_policy_00001", 16384)),
        ]
    )
    assert sizes == {"default": 65536, "cilium_lxc": 65535, "hive_endpoints": 4096, "policy": 16384}
