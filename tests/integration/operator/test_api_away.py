"""The operator while the API server is down: probes fail, a leader continues for a while, then catches up."""

from __future__ import annotations

from contextlib import AsyncExitStack
from http.client import HTTPConnection
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from cells.operator.leader import LeaderHive, Leadership
from lifecycle import Hive, HiveError
from lifecycle.testing import eventually
from tests.integration.operator.recordings import Json, load
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.operator.running import POOL

pytestmark = pytest.mark.anyio
NODES = Resource("cilium.io", "ciliumnodes")


def recorded(name: str) -> list[Json]:
    """What a scenario makes once the server is back."""
    return [one["body"] for one in load(name)["steps"][2]["by_test"] if one["method"] == "POST"]


async def healthz(hive: Hive) -> tuple[int, str]:
    where = next(one.value for one in hive.settings() if one.option.name == "operator-api-serve-addr")

    def ask() -> tuple[int, str]:
        connection = HTTPConnection(str(where), timeout=30)
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await anyio.to_thread.run_sync(ask)


def served(server: ApiServer) -> set[str]:
    """The CiliumNodes that have ranges."""
    found = server.store.of(NODES).objects.items()
    return {key[1] for key, one in found if one["spec"].get("ipam", {}).get("podCIDRs")}


@pytest.mark.parametrize("name", ["api_away_short", "api_away_survived"])
async def test_an_absence_shorter_than_the_lease_is_survived(name: str, tmp_path: Path) -> None:
    server = ApiServer()
    server.crd_delay = 0
    operators = Operators(server, tmp_path)
    async with AsyncExitStack() as first, AsyncExitStack() as again:
        await first.enter_async_context(server.serving())
        port = server.port
        async with operators.running(POOL) as hive:
            assert await healthz(hive) == (200, "ok")
            await first.aclose()
            status, text = await healthz(hive)
            assert status == 500
            assert "/version" in text or "127.0.0.1" in text, text
            work = hive.get(LeaderHive).current
            for body in recorded(name):
                server.add(body)
            await again.enter_async_context(server.serving(port=port))
            await eventually(lambda: served(server) == {"node-a"}, 30)
            assert hive.get(Leadership).leads
            assert hive.get(LeaderHive).current is work, "it is not begun anew"
            assert await healthz(hive) == (200, "ok")


async def test_an_absence_longer_than_the_lease_ends_the_leader_and_the_next_goes_on(tmp_path: Path) -> None:
    server = ApiServer()
    server.crd_delay = 0
    operators = Operators(server, tmp_path)
    brief = {
        "leader-election-lease-duration": "5s",
        "leader-election-renew-deadline": "4s",
        "leader-election-retry-period": "100ms",
    }
    async with AsyncExitStack() as first:
        await first.enter_async_context(server.serving())
        with pytest.raises(HiveError, match="leader election lost"):  # noqa: PT012  # it ends it
            async with operators.running(POOL | brief):
                await first.aclose()
                await anyio.sleep_forever()
    async with server.serving():
        for body in recorded("api_away_long"):
            server.add(body)
        async with operators.running(POOL | brief):
            await eventually(lambda: served(server) == {"node-a"}, 30)
