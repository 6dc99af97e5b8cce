"""The lab's kernel inspection: pinned objects, growth, and complete removal."""

import os
import struct
from pathlib import Path

import pytest

from cells.maps.bpf import pin
from cells.maps.map import MapSpec, MapType, create_map
from hive.lab.demo.teardown import wait_empty
from hive.lab.kernel import BPF_ROOT, STATE, BPFObjects, alive, bpf_objects, pod_resources
from tests.support.namespaces import node_namespace

pytestmark = pytest.mark.node

GLOBALS = BPF_ROOT / "tc" / "globals"
LXC = MapSpec("cilium_lxc", MapType.HASH, 20, 48, 16)
CALLS = MapSpec("hive_calls_1", MapType.PROG_ARRAY, 4, 4, 8)


def make_pins() -> None:
    GLOBALS.mkdir(parents=True)
    for spec in (LXC, CALLS):
        with create_map(spec) as made:
            pin(made.fd, GLOBALS / spec.name)


def add_pod() -> None:
    from cells.maps.map import open_map

    with open_map(GLOBALS / LXC.name) as lxc:
        lxc.update(struct.pack("20s", b"pod"), bytes(48))
    (STATE / "7").mkdir(parents=True)


def test_pins_are_seen_with_their_ids() -> None:
    with node_namespace() as node:
        node.run(make_pins)
        kernel = node.run(bpf_objects)
    assert set(kernel.maps) == {"tc/globals/cilium_lxc", "tc/globals/hive_calls_1"}
    assert kernel.map_ids == set(kernel.maps.values())
    assert set(kernel.persistent_maps) == {"tc/globals/cilium_lxc"}
    assert (kernel.programs, kernel.entries) == ({}, {})


def test_kernel_objects_added_by_a_pod_are_listed() -> None:
    with node_namespace() as node:
        node.run(make_pins)
        before = node.run(pod_resources)
        node.run(add_pod)
        after = node.run(pod_resources)
    assert after.added_since(before) == [f"row {b'pod'.hex().ljust(40, '0')} of cilium_lxc", "state 7"]
    assert before.added_since(after) == []


def test_maps_exist_until_their_node_is_removed() -> None:
    with node_namespace() as node:
        node.run(make_pins)
        kernel = node.run(bpf_objects)
        assert len(alive(kernel.map_ids, [])) == 2
    assert wait_empty(lambda: alive(kernel.map_ids, [])) == []


def test_an_empty_bpffs_is_an_empty_kernel() -> None:
    with node_namespace() as node:
        assert node.run(bpf_objects) == BPFObjects()
        assert node.run(os.path.exists, Path("/run/cilium/state")) is False
        assert node.run(pod_resources).added_since(node.run(pod_resources)) == []
