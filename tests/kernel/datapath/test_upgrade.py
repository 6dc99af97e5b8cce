"""A start that replaces pinned maps by others loses no traffic, also if it fails."""

import struct
from pathlib import Path

import pytest
from msgspec.structs import replace

from cells.maps.bpf import replace_pin
from cells.maps.map import Map, create_map, open_map
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import PolicyKey
from lifecycle import StartError
from tests.kernel.datapath.node import LivePod, running
from tests.kernel.datapath.traffic import flow, lost
from tests.support.namespaces import in_node
from tests.support.waiting import eventually

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

GLOBALS = Path("/sys/fs/bpf/tc/globals")
RESIZED = {"bpf_ct_global_any_max": 8192}


def pins() -> set[str]:
    return {path.name for path in GLOBALS.iterdir()}


def retired_maps() -> set[str]:
    return {name for name in pins() if "_former_" in name}


def pin_shorter(table: Map, size: int) -> None:
    """Pin what an earlier build had in the place of a map: its entries, cut off. Programs keep the map."""
    with create_map(replace(table.spec, value_size=size)) as earlier:
        for key, value in table.items():
            earlier.update(key, value[:size])
        replace_pin(earlier.fd, GLOBALS / table.spec.name)


async def test_no_packet_is_lost_to_an_upgrade_from_before_ipv6(in_node: None) -> None:
    async with running() as node:
        node.add_host()
        one, two = node.add_pod(10), node.add_pod(11)
        rows = dict(node.maps.endpoints.items())
        pin_shorter(node.maps.endpoints, 32)
        pin_shorter(node.maps.node, 48)
    with flow(one, two) as pods, flow(None, one) as down:
        eventually(lambda: len(pods[1]) > 100 and len(down[1]) > 100)
        async with running() as node:
            assert node.maps.created == {"hive_endpoints", "hive_node"}
            assert dict(node.maps.endpoints.items()) == rows
            assert node.datapath.generation == 2
        so_far = len(pods[0])
        eventually(lambda: len(pods[0]) > so_far + 100)
    assert (lost(pods), lost(down)) == (set(), set())
    assert retired_maps() == set()


def ipv4_alone(maps: Maps) -> None:
    """Cells that use only what every node has; pods have IPv4 alone."""


async def test_no_packet_is_lost_as_maps_go_that_nothing_uses_any_more(in_node: None) -> None:
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
    with flow(one, two) as pods:
        eventually(lambda: len(pods[1]) > 100)
        for start, generation in enumerate((2, 2)):  # the second has nothing to change
            async with running(ipv4_alone) as node:
                assert node.datapath.generation == generation, start
                assert pins() & {*node.maps.unused, "cilium_ct6_global"} == set()
        async with running() as node:  # and back
            assert node.datapath.generation == 3
            assert "cilium_ct6_global" in pins()
        so_far = len(pods[0])
        eventually(lambda: len(pods[0]) > so_far + 100)
    assert lost(pods) == set()


def only_answers(pod: LivePod) -> None:
    """The pod may send nothing of its own accord."""
    pod.policy.delete(PolicyKey(0, True).pack())


async def test_connections_outlive_a_conntrack_map_of_another_size(in_node: None) -> None:
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
        only_answers(one)
    with flow(one, two, answer=True) as traffic:
        eventually(lambda: len(traffic[1]) > 100)
        async with running(**RESIZED) as node:
            assert node.maps.created == {"cilium_ct_any4_global", "cilium_ct_any6_global"}
        so_far = len(traffic[0])
        eventually(lambda: len(traffic[0]) > so_far + 100)
    assert lost(traffic) == set()
    assert retired_maps() == set()


async def test_connections_made_after_a_start_that_failed_outlive_the_next(
    in_node: None, tmp_path: Path
) -> None:
    nothing = tmp_path / "text.o"
    nothing.write_text("not an object")
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
        only_answers(one)
        generation = node.datapath.programs["hive_from_pod"]
    with pytest.raises(StartError):
        async with running(datapath_object=nothing, **RESIZED):
            pass
    assert len(retired_maps()) == 2
    with open_map(GLOBALS / "hive_entry") as entry:
        assert entry.lookup(bytes(4)) == struct.pack("<I", generation)
    with flow(one, two, answer=True) as traffic:
        eventually(lambda: len(traffic[1]) > 100)
        async with running(**RESIZED) as node:
            assert node.maps.created == frozenset()
            assert node.datapath.generation == 2
        so_far = len(traffic[0])
        eventually(lambda: len(traffic[0]) > so_far + 100)
    assert lost(traffic) == set()
    assert retired_maps() == set()
