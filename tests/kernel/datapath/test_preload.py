"""A new node's maps and programs are loaded before the start and then used by it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from cells import config, datapath, maps, netlink
from cells.datapath.datapath import Datapath
from cells.datapath.programs import ENTRIES
from cells.maps.map import open_map
from cells.maps.node_maps import Maps
from hive.agent.forecast import forecast
from hive.agent.preload import preload
from lifecycle import Cell, Hive, Sources, StartError, explain, invoke, supply
from tests.kernel.datapath.node import STATE, root
from tests.support.namespaces import in_node
from tests.support.waiting import eventually

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

FLAGS = ("--bpf-ct-global-tcp-max=4096", "--bpf-ct-global-any-max=4096", "--bpf-nat-global-max=4096")
OUTSIDE = "--enable-node-port=true"
"""The few cells of these hives know nothing of services: programs serve clients outside."""
GLOBALS = Path("/sys/fs/bpf/tc/globals")


def sources(*flags: str) -> Sources:
    return Sources([*FLAGS, OUTSIDE, *flags], {})


def expected_use(maps: Maps) -> None:
    """What the cells of a whole agent would ask for."""
    wanted = forecast(sources())
    assert wanted is not None
    maps.use(*wanted.used)


@asynccontextmanager
async def started(loading: Sequence[Cell], *flags: str) -> AsyncIterator[Datapath]:
    settings = dict(flag.removeprefix("--").split("=") for flag in (*FLAGS, *flags))
    hive = Hive(
        *(config.cell, maps.cell, netlink.cell, datapath.cell),
        *(*loading, invoke(root, expected_use)),
        settings=settings | {"state-dir": STATE},
    )
    async with hive.started():
        yield hive.get(Datapath)


def held(kind: str) -> set[int]:
    """Ids of the programs (``prog``) or maps (``map``) that this process has open."""
    entries = [*Path("/proc/self/fdinfo").iterdir()]  # one is of the listing itself, and closed by now
    texts = (entry.read_text(encoding="ascii") for entry in entries if entry.exists())
    rows = (line.split(":") for text in texts for line in text.splitlines())
    return {int(row[1]) for row in rows if row[0] == f"{kind}_id"}


def pinned() -> list[Path]:
    """What is pinned where maps are."""
    return [*GLOBALS.iterdir()] if GLOBALS.exists() else []


def map_id(name: str) -> int:
    """The kernel's id of a map by its pin."""
    with open_map(GLOBALS / name) as table:
        return table.id


def loaded_ahead(*flags: str) -> tuple[Sequence[Cell], set[int]]:
    """What is loaded before a start, and the ids of its programs."""
    found = preload(sources(*flags))
    assert found is not None
    eventually(lambda: found[1].done)
    return tuple(map(supply, found)), held("prog")


async def test_the_start_of_a_new_node_takes_what_was_loaded(in_node: None) -> None:
    loading, programs = loaded_ahead()
    maps_before = held("map")
    assert len(programs) == len(ENTRIES)
    assert not pinned()
    async with started(loading) as node:
        assert {node.programs[name] for name in ENTRIES} == programs
        assert node.generation == 1
        assert {map_id(name) for name in ("hive_entry", "cilium_ct4_global", "cilium_lxc")} <= maps_before
        assert node.known_node() is None, "the trial of the programs has left a row"


@pytest.mark.parametrize("other", ["--bpf-ct-timeout-regular-tcp=1h", "--bpf-lb-map-max=4096"])
async def test_what_other_settings_load_is_closed_and_not_used(in_node: None, other: str) -> None:
    loading, programs = loaded_ahead(other)
    async with started(loading) as node:
        assert not {node.programs[name] for name in ENTRIES} & programs
        assert not held("prog") & programs


async def test_a_program_that_is_refused_is_reported_by_the_start(in_node: None, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.o"
    wrong.write_bytes(b"not a datapath")
    loading, programs = loaded_ahead(f"--datapath-object={wrong}")
    assert not programs
    with structlog.testing.capture_logs(), pytest.raises(StartError) as raised:
        async with started(loading, f"--datapath-object={wrong}"):
            pass
    assert f"datapath-object={wrong}" in str(explain(raised.value))


async def test_nothing_is_loaded_ahead_where_an_agent_has_its_maps(in_node: None) -> None:
    loading, _ = loaded_ahead()
    async with started(loading):
        assert preload(sources()) is None


async def test_nothing_is_loaded_ahead_by_wrong_settings(in_node: None) -> None:
    assert preload(sources("--mtu=many")) is None
