"""Fixture: a node with services."""

import pytest

from tests.kernel.datapath.conftest import loaded_world, world
from tests.kernel.datapath.world import World
from tests.kernel.datapath_services.services import Services

__all__ = ["loaded_world", "world"]


@pytest.fixture
def services(world: World) -> Services:
    """Reset to no services."""
    return Services(world.maps)
