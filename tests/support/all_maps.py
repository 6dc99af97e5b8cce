"""For hives of a few cells, with tests that read and write maps that other cells would ask for."""

from __future__ import annotations

from cells.maps.node_maps import Maps
from cells.maps.specs import MapSizes, map_specs

EVERY = tuple(map_specs(MapSizes(1, 1, 1), preallocate=False, cpus=1))


def every_map(maps: Maps) -> None:
    """A constructor, to be invoked: of both families, whatever pods have."""
    maps.use(*EVERY, both_families=True)
