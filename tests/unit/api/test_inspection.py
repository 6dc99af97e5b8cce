"""The agent's own graph and timeline, as ``hive inspect`` reads them over the socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifecycle.graph import read_graph, read_timeline
from lifecycle.process.loop_lag import measured_loop
from tests.unit.api.node import running_node

pytestmark = pytest.mark.anyio


async def test_the_running_graph_and_its_timeline_are_about_the_same_hooks(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        graph = read_graph((await node.ask("GET", "/hive/graph")).raw)
        timeline = read_timeline((await node.ask("GET", "/hive/timeline")).raw)
    hooks = {hook.id: hook for hook in graph.hooks}
    assert "serve the API" in {hook.name for hook in hooks.values()}
    assert set(timeline.of("start")) == set(hooks)
    assert set(timeline.of("construct")) == {
        one.id for one in graph.constructors if one.built and one.kind == "provide"
    }


async def test_inspection_only_reads(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        got = await node.ask("POST", "/hive/graph", {})
        again = await node.ask("GET", "/hive/timeline")
    assert got.status == 405
    assert again.headers["Content-Type"].startswith("application/json")


async def test_an_unmeasured_loop_is_answered_404(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        assert (await node.ask("GET", "/hive/loop")).status == 404


class TestMeasured:
    """In a loop made to be measured, as the agent's is."""

    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, object]]:
        return "asyncio", {"loop_factory": measured_loop}

    async def test_the_time_slices_of_the_loop_are_shown(self, tmp_path: Path) -> None:
        async with running_node(tmp_path) as node:
            got = (await node.ask("GET", "/hive/loop")).body
        assert len(got["counts"]) == len(got["bounds"]) + 1
        assert sum(got["counts"]) > 0
        assert got["longest"] > 0
