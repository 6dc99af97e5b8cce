"""Fixtures: the node of the packet tests with clients outside, and routes given by a test."""

from collections.abc import Iterator

import pytest

from tests.kernel.datapath_nodeport.world import DriverWorld, NodePortWorld
from tests.support.namespaces import need_root


@pytest.fixture(scope="module", params=[NodePortWorld, DriverWorld], ids=["stack", "driver"])
def loaded_world(request: pytest.FixtureRequest) -> Iterator[NodePortWorld]:
    """Load maps and programs: at tc only, and with the driver's program."""
    need_root()
    with request.param() as world:
        yield world


@pytest.fixture
def world(loaded_world: NodePortWorld) -> NodePortWorld:
    """Reset to no connections."""
    loaded_world.reset()
    return loaded_world
