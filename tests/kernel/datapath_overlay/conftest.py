"""Fixtures: a node with a tunnel, created once per module and reset for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.datapath_overlay.world import OverlayWorld
from tests.support.namespaces import need_root


@pytest.fixture(scope="module")
def loaded_overlay() -> Iterator[OverlayWorld]:
    """Load maps and programs."""
    need_root()
    with OverlayWorld() as world:
        yield world


@pytest.fixture
def overlay(loaded_overlay: OverlayWorld) -> OverlayWorld:
    """Reset to two pods, another node, no connections, no counts."""
    loaded_overlay.reset()
    return loaded_overlay
