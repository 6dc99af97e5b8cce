"""The packet tests' node, made once a module and reset for each test."""

from collections.abc import Iterator

import pytest

from tests.kernel.datapath.world import World
from tests.support.namespaces import need_root


@pytest.fixture(scope="module")
def loaded_world() -> Iterator[World]:
    """Maps and programs; loading takes some milliseconds."""
    need_root()
    with World() as world:
        yield world


@pytest.fixture
def world(loaded_world: World) -> World:
    """Two pods allowed everything, no connections, no counts."""
    loaded_world.reset()
    return loaded_world
