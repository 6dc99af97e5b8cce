"""The client accepts recorded responses of API servers, by watch and by error."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
import structlog

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.errors import ConflictError, ExpiredError, NotFoundError, api_error
from cells.kubernetes.reflector import Reflector
from cells.kubernetes.sink import Sink, SourceStatus
from lifecycle import HealthTree, Table
from lifecycle.testing import eventually
from tests.unit.apiserver.replay import RECORDINGS
from tests.unit.kubernetes.listening import listening
from tests.unit.kubernetes.played import CUTS, Player, Recorded, recorded_watches

EVERY = list(recorded_watches())
WATCHES = [one for one in EVERY if isinstance(one, Recorded)]


def test_few_recorded_watches_are_left_out() -> None:
    left_out = [one for one in EVERY if isinstance(one, str)]
    sys.stdout.write(f"\nwatches played: {len(WATCHES)}, left out: {len(left_out)}\n")
    sys.stdout.writelines(f"  {one}\n" for one in left_out)
    assert len(WATCHES) > 4 * len(left_out)


@pytest.mark.anyio
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recorded", WATCHES, ids=lambda one: one.name)
async def test_a_recorded_watch_is_followed(recorded: Recorded, cut: str) -> None:
    player = Player(recorded, cut)
    left, version, code = recorded.outcome()
    table: Table[Any, Any] = Table("objects", key=lambda one: one.key)
    statuses: Table[str, SourceStatus] = Table("sources", key=lambda one: one.kind)
    sink: Sink[Any] = Sink(
        recorded.kind, table, statuses, HealthTree().reporter("k8s"), structlog.get_logger()
    )
    sink.begin()
    async with listening(player.serve) as port:
        client = connect(Access(servers=(f"http://127.0.0.1:{port}",)), qps=0, timeout=60)
        reflector = Reflector(client, recorded.kind, sink, first_pause=0.01, longest_pause=0.1)
        task = asyncio.create_task(reflector.run())
        try:
            await eventually(lambda: player.reported_all, within=60)
            await eventually(lambda: {one.key for one in table.all()} == left, within=60)
            if code == 410:
                await asyncio.wait_for(player.relisted.wait(), 60)
                assert not player.resumed
            elif code or "closed by the client" not in recorded.ends:
                await eventually(lambda: bool(player.resumed), within=60)
                assert player.resumed == [version]
                assert player.lists == 1
            assert not any(one.broken for one in statuses.all())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.reset()
    assert {one.key for one in table.all()} == left


def test_every_recorded_refusal_has_its_own_error() -> None:
    seen = 0
    for path in sorted(RECORDINGS.glob("*.json")):
        for step in json.loads(path.read_bytes()).get("exchanges", ()) if path.name != "index.json" else ():
            answer = step.get("response") or {}
            body = answer.get("body", answer.get("body_text"))
            if answer.get("status", 0) < 400 or body is None:
                continue
            where = f"{path.stem} {step['id']}"
            raw = body if isinstance(body, str) else json.dumps(body)
            error = api_error(
                answer["status"], raw.encode(), answer.get("headers", {}).get("Retry-After", "")
            )
            seen += 1
            assert error.code == answer["status"], where
            assert isinstance(error, NotFoundError) is (error.code == 404), where
            assert isinstance(error, ExpiredError) is (error.code == 410), where
            assert isinstance(error, ConflictError) is (error.code == 409), where
            if isinstance(body, dict):
                assert error.status.message == body.get("message", ""), where
                assert error.reason == body.get("reason", ""), where
            else:
                assert error.status.message, where
            if answer.get("headers", {}).get("Retry-After"):
                assert error.retry_after == float(answer["headers"]["Retry-After"]), where
    assert seen > 200
