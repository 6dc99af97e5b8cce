"""The packet tests' node, serving clients outside, with routes that a test gives."""

from collections.abc import Iterator

import pytest

from tests.kernel.datapath_nodeport.world import DriverWorld, NodePortWorld
from tests.support.namespaces import need_root


@pytest.fixture(scope="module", params=[NodePortWorld, DriverWorld], ids=["stack", "driver"])
def loaded_world(request: pytest.FixtureRequest) -> Iterator[NodePortWorld]:
    """Maps and programs: at tc alone, and in the driver too."""
    need_root()
    with request.param() as world:
        yield world


@pytest.fixture
def world(loaded_world: NodePortWorld) -> NodePortWorld:
    """Before any client has connected."""
    loaded_world.reset()
    return loaded_world
