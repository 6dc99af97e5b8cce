"""A hive that consists of the maps, on a node of the test."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from cells import config, maps
from cells.maps import MapWatchdog
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from lifecycle import Hive, invoke
from tests.support.all_maps import every_map

GLOBALS = Path("/sys/fs/bpf/tc/globals")
SMALL: Mapping[str, object] = {
    "bpf-ct-global-tcp-max": 1024,
    "bpf-ct-global-any-max": 1024,
    "bpf-policy-map-max": 256,
    "policy-map-pool": 4,
}


@dataclass
class Node:
    """The maps of a started agent, and its log."""

    maps: Maps
    policies: PolicyMaps
    watchdog: MapWatchdog
    logged: list[structlog.typing.EventDict]


def use(maps: Maps, _: PolicyMaps) -> None:
    """Depend on every map and on the pool."""
    every_map(maps)


@asynccontextmanager
async def agent(uses: Callable[[Maps, PolicyMaps], None] = use, /, **settings: object) -> AsyncIterator[Node]:
    """Run the maps of an agent until the block ends; ``uses`` lists the maps that its cells need."""
    given = {**SMALL, **{name.replace("_", "-"): value for name, value in settings.items()}}
    with structlog.testing.capture_logs() as logged:
        async with Hive(
            config.cell, maps.cell, maps.watchdog_cell, invoke(uses), settings=given
        ).started() as hive:
            yield Node(hive.get(Maps), hive.get(PolicyMaps), hive.get(MapWatchdog), logged)


def pins() -> set[str]:
    """Return the names of all pins in the directory of Cilium's tools."""
    return {path.name for path in GLOBALS.iterdir()}


def policy_pins() -> set[str]:
    """Return the pins of policy maps."""
    return {name for name in pins() if name.startswith("cilium_policy_")}
