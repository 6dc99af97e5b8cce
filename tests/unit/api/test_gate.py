"""API responses while the daemon starts: some requests succeed at once, others once it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import aiohttp
import anyio
import pytest

from cells.api.server import Gate
from cells.endpoint.restore import RegeneratedEndpoints
from lifecycle import Cell, HiveError, Hook, Lifecycle, provide
from lifecycle.http import Response
from lifecycle.testing import eventually
from tests.unit.api.node import Answer, Client, running_node

pytestmark = pytest.mark.anyio

AT_ONCE = (
    ("GET", "/v1/config", 200),
    ("PATCH", "/v1/config", 422),
    ("POST", "/v1/ipam?family=ipx", 422),
    ("GET", "/v1/map", 200),
    ("GET", "/v1/cluster/nodes", 200),
    ("GET", "/v1/node/ids", 200),
    ("GET", "/v1/policy", 200),
    ("GET", "/v1/service", 200),
    ("GET", "/v1/cgroup-dump-metadata", 200),
    ("GET", "/hive/graph", 200),
    ("GET", "/statedb/tables", 200),
)
LATER = (
    ("GET", "/v1/healthz", 200),
    ("GET", "/v1/endpoint", 200),
    ("PUT", "/v1/endpoint/cilium-local:0", 422),
    ("DELETE", "/v1/endpoint", 422),
    ("GET", "/v1/endpoint/7/healthz", 404),
    ("GET", "/v1/identity", 200),
    ("GET", "/v1/debuginfo", 200),
    ("GET", "/v1/fqdn/cache", 200),
    ("GET", "/v1/ip", 404),
)


class Starting:
    """A node where the API serves and the daemon does not run yet."""

    def __init__(self, ask: Client, go_on: Callable[[Exception | None], None]) -> None:
        self.ask = ask
        self.go_on = go_on


@asynccontextmanager
async def starting(directory: Path) -> AsyncIterator[Starting]:
    """The node until the block ends; its start continues, or fails, on request."""
    socket, held, over = directory / "cilium.sock", anyio.Event(), anyio.Event()
    fault: list[Exception] = []

    async def hold() -> None:
        await held.wait()
        for error in fault:
            raise error

    def regenerated(lifecycle: Lifecycle) -> RegeneratedEndpoints:
        lifecycle.append(Hook("hold the start", hold))
        return RegeneratedEndpoints.__new__(RegeneratedEndpoints)

    def go_on(error: Exception | None) -> None:
        fault.extend([error] if error else [])
        held.set()

    async def run(cell: Cell) -> None:
        try:
            async with running_node(directory, regenerated=cell):
                await over.wait()
        except* HiveError:
            assert fault

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, provide(regenerated))
        await eventually(socket.exists)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
            yield Starting(Client(session), go_on)
        held.set()
        over.set()


async def all_of(ask: Client, wanted: tuple[tuple[str, str, int], ...]) -> list[Answer]:
    """Ask all of these at the same time."""
    answers: dict[int, Answer] = {}

    async def one(number: int, method: str, path: str) -> None:
        answers[number] = await ask(method, path)

    async with anyio.create_task_group() as tasks:
        for number, (method, path, _) in enumerate(wanted):
            tasks.start_soon(one, number, method, path)
    return [answers[number] for number in range(len(wanted))]


@pytest.mark.parametrize(("method", "path", "status"), AT_ONCE)
async def test_requests_without_need_of_the_daemon_are_answered_at_once(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with starting(tmp_path) as node:
        with anyio.fail_after(30):
            assert (await node.ask(method, path)).status == status


@pytest.mark.parametrize(("method", "path", "status"), LATER)
async def test_requests_that_need_the_daemon_wait_for_it(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    answers: list[Answer] = []

    async def one(ask: Callable[..., Awaitable[Answer]]) -> None:
        answers.append(await ask(method, path))

    async with starting(tmp_path) as node, anyio.create_task_group() as tasks:
        tasks.start_soon(one, node.ask)
        for _ in range(20):  # the later ones overtake it
            assert (await node.ask("GET", "/v1/config")).status == 200
        assert not answers
        node.go_on(None)
        await eventually(lambda: bool(answers))
    assert answers[0].status == status


async def test_requests_waiting_for_a_failed_start_get_an_error(tmp_path: Path) -> None:
    async with starting(tmp_path) as node, anyio.create_task_group() as tasks:
        answers: list[list[Answer]] = []

        async def ask() -> None:
            answers.append(await all_of(node.ask, LATER))

        tasks.start_soon(ask)
        for _ in range(20):
            assert (await node.ask("GET", "/v1/config")).status == 200
        node.go_on(HiveError("a map is gone"))
        await eventually(lambda: bool(answers))
    ((*got,),) = answers
    assert {each.status for each in got} == {503}
    assert got[0].body == (
        "the agent stopped before it had started: see its log, and ask again once it is back"
    )


async def test_a_gate_that_closed_opens_again() -> None:
    gate = Gate()
    answered = gate.gated("/v1/endpoint", AsyncMock(return_value=Response(204)))
    gate.close()
    gate.open()
    gate.open()
    gate.close()
    assert (await answered(Mock())).status == 204
