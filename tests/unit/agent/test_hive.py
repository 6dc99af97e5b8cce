"""The agent over fakes, without a kernel: ordered start in any order of siblings, clean failures.

The same over the real kernel is in tests/kernel/agent.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import anyio
import pytest
import structlog

from cells.agent import agent
from cells.endpoint import Endpoints, StateFiles
from lifecycle import Modules
from lifecycle.testing import Recorder, VirtualClock, fail_each_hook, started
from tests.support.agent_order import ORDER
from tests.support.points import EVERY, each_hook
from tests.unit.agent.fakes import REPLACED, fakes, settings, with_links, without_links
from tests.unit.endpoint.fakes import FakeKernel, Node, request
from tests.unit.endpoint_restore.fakes import link

__all__ = ["settings"]

pytestmark = pytest.mark.anyio


OTHER_NODES = ("nodes", "tunnels")
"""Maps of which reconcilers read the rows."""


async def test_the_agent_starts_and_announces_itself(tmp_path: Path, settings: dict[str, object]) -> None:
    async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings):
        assert (tmp_path / "cilium.sock").is_socket()
        assert (tmp_path / "cni.sock").is_socket()
    assert not (tmp_path / "cilium.sock").exists()
    assert not (tmp_path / "cni.sock").exists()
    assert (tmp_path / "net.d" / "05-cilium.conflist").exists()


async def test_an_endpoint_of_before_is_there_when_anyone_can_ask(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    (tmp_path / "state").mkdir()
    node = Node(tmp_path / "state")
    endpoint = node.create(request(7))
    StateFiles(tmp_path / "state").write(endpoint)
    present = link(endpoint.ifindex, endpoint.ifname, alias=f"hive endpoint {endpoint.id}")
    links = with_links(present)
    async with started(agent, *fakes(tmp_path, FakeKernel(), links), settings=settings) as hive:
        (restored,) = hive.get(Endpoints).all()
        assert (restored.id, restored.ipv4) == (endpoint.id, endpoint.ipv4)


@pytest.mark.parametrize("seed", range(5))
async def test_the_facts_of_the_start_hold_in_any_order_of_siblings(
    tmp_path: Path, settings: dict[str, object], seed: int
) -> None:
    recorder = Recorder(seed)
    async with recorder.started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings):
        facts = [(first, then) for first, then in ORDER if not {first, then} & REPLACED]
        recorder.assert_before(*facts)
        for first, then in facts:
            with pytest.raises(AssertionError, match="not in order"):
                recorder.assert_before((then, first))
    recorder.assert_clean()


async def test_an_api_that_was_down_with_what_it_needs_comes_back_whole(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    socket_path = tmp_path / "cilium.sock"
    async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings) as hive:
        modules = hive.get(Modules)
        assert "agent.api" in await modules.disable("agent.cni-server")
        assert not socket_path.exists()
        await modules.enable("agent.cni-server")
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket_path))) as session:
            with anyio.fail_after(30):
                async with session.get("http://localhost/v1/identity") as got:
                    assert got.status == 200
                async with session.get("http://localhost/statedb/changes/devices") as got:
                    assert b"eth0" in await got.content.readline()
                    assert not got.content.at_eof()


async def test_every_module_may_be_disabled_and_comes_back(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings) as hive:
        modules = hive.get(Modules)
        before = {table.name for table in hive.tables.all()}
        for name in modules.names:
            down = await modules.disable(name)
            assert {name, *await modules.enable(name)} == set(down)
            assert name != "agent.policy" or "agent.shell.admin" not in down, "it could not be stopped there"
        assert {table.name for table in hive.tables.all()} == before


@pytest.mark.timeout(3600 if EVERY else 600)  # the agent is started for every hook
async def test_whichever_hook_fails_the_agent_ends_cleanly(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    with structlog.testing.capture_logs():  # errors by the hundred
        failed = await fail_each_hook(
            agent,
            fakes=lambda: fakes(tmp_path, FakeKernel(), without_links()),
            settings=settings,
            seed=3,
            within=30,
            only=each_hook(),
        )
    assert {one.phase for one in failed} >= {"start", "stop"}, (
        "of the few hooks of a run some can be interrupted"
    )
    assert len({one.hook for one in failed}) > 8


async def test_the_start_waits_for_no_timer(tmp_path: Path, settings: dict[str, object]) -> None:
    with VirtualClock() as clock:
        began = clock.now
        async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings):
            assert clock.now == began
            await clock.advance(3600)
