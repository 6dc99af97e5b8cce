"""The number of instructions that the verifier processes for the programs."""

import os

import pytest

from cells.datapath.build import find_clang, major_version
from cells.datapath.collector import ADDRESSES
from cells.datapath.generation import load
from cells.datapath.libbpf import LoadedObject
from cells.datapath.programs import L3_ENTRIES, XDP_ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings
from cells.maps.bpf import program_by_id
from cells.maps.map import create_map
from tests.kernel.datapath.node import running
from tests.kernel.datapath.verified import processed
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

ROOM, ROOM_17 = 150_000, 300_000
"""Of what the kernel allows less than a third: other kernels, which may count more, are to load them as well.

The kernel allows a million. Of what clang 17 makes, that of Debian 13, it follows half as much again:
203 thousand against 134.
"""


async def test_the_verifier_accepts_every_program_with_room_to_spare(in_node: None) -> None:
    counts = {}
    async with running() as node:
        for name, number in node.datapath.programs.items():
            descriptor = program_by_id(number)
            counts[name] = processed(descriptor)
            os.close(descriptor)
        gc = (PACKAGED_OBJECTS / "gc.o").read_bytes()
        with create_map(ADDRESSES) as vanished, LoadedObject(gc, "gc.o") as collector:
            tables = *node.maps.conntrack, *node.maps.nat, vanished
            collector.use_maps({table.spec.name: table.fd for table in tables})
            collector.load()
            counts |= {name: processed(descriptor) for name, descriptor in collector.programs().items()}
        xdp = (PACKAGED_OBJECTS / "xdp.o").read_bytes()
        driver, _ = load(xdp, "xdp.o", node.maps.all(), 1, DatapathSettings(), programs=XDP_ENTRIES.keys())
        with driver:
            counts |= {name: processed(descriptor) for name, descriptor in driver.programs().items()}
        l3 = (PACKAGED_OBJECTS / "l3.o").read_bytes()
        bare, _ = load(l3, "l3.o", node.maps.all(), 1, DatapathSettings(), programs=L3_ENTRIES.keys())
        with bare:
            counts |= {name: processed(descriptor) for name, descriptor in bare.programs().items()}
    assert len(counts) == 34
    room = ROOM if major_version(find_clang()) < 17 else ROOM_17
    assert {name: count for name, count in counts.items() if not 0 < count < room} == {}
