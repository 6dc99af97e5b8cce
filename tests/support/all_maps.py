"""All maps, for tests of a few cells that use maps which none of these cells requests."""

from __future__ import annotations

from cells.maps.node_maps import Maps
from cells.maps.specs import MapSizes, map_specs

EVERY = tuple(map_specs(MapSizes(1, 1, 1), preallocate=False, cpus=1))


def every_map(maps: Maps) -> None:
    """A constructor for invoke(): requests the maps of both families."""
    maps.use(*EVERY, both_families=True)
