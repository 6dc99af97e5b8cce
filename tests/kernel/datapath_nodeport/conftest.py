"""The packet tests' node, serving clients outside, with routes that a test gives."""

from collections.abc import Iterator

import pytest

from tests.kernel.datapath_nodeport.world import NodePortWorld
from tests.support.namespaces import need_root


@pytest.fixture(scope="module")
def loaded_world() -> Iterator[NodePortWorld]:
    """Maps and programs."""
    need_root()
    with NodePortWorld() as world:
        yield world


@pytest.fixture
def world(loaded_world: NodePortWorld) -> NodePortWorld:
    """Nobody has asked yet."""
    loaded_world.reset()
    return loaded_world
