"""Fixtures: the node of the packet tests, created once per module and reset for each test."""

import os
import struct
from collections.abc import Iterator

import pytest

from cells.observe.events.reader import Ring
from cells.observe.events.records import decode
from tests.kernel.datapath.world import Listen, World
from tests.support.namespaces import need_root
from tests.support.processor import on_one_processor


@pytest.fixture(scope="module")
def loaded_world() -> Iterator[World]:
    """Load maps and programs, which takes some milliseconds."""
    need_root()
    with World() as world:
        yield world


@pytest.fixture
def world(loaded_world: World) -> World:
    """Reset to two pods with allow-all policies, no connections, no counts."""
    loaded_world.reset()
    return loaded_world


@pytest.fixture
def events(world: World) -> Iterator[Listen]:
    """Return a function that removes and returns the events since its last call."""
    rings = [Ring(cpu, 4) for cpu in range(os.cpu_count() or 1)]
    for ring in rings:
        world.maps["cilium_events"].update(struct.pack("<I", ring.cpu), struct.pack("<I", ring.fd))
    with on_one_processor():
        yield lambda: [decode(each) for ring in rings for each in ring.read(100) if isinstance(each, bytes)]
    for ring in rings:
        world.maps["cilium_events"].delete(struct.pack("<I", ring.cpu))
        ring.close()
