"""All tasks that wait for an API server continue when it is back, despite long backoffs."""

from __future__ import annotations

import time

import anyio
import pytest

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.errors import KubernetesError
from cells.kubernetes.objects.core import PODS
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer

pytestmark = pytest.mark.anyio


async def test_a_server_that_comes_wakes_those_who_wait_for_one() -> None:
    server = ApiServer()
    async with server.serving() as url:
        port = int(url.rsplit(":", 1)[1])
    client = connect(Access(servers=(url,), token=ADMIN_TOKEN), qps=0, timeout=30)
    with pytest.raises(KubernetesError):
        await client.create(PODS, {}, "default")
    assert client.reachability.unreachable
    woken: list[float] = []

    async def wait() -> None:
        await client.reachability.pause(3600)
        woken.append(time.monotonic())

    async with anyio.create_task_group() as group:
        group.start_soon(client.probe)
        for _ in range(20):
            group.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        assert not woken
        async with server.serving(port=port):
            await eventually(lambda: len(woken) == 20, within=30)
            group.cancel_scope.cancel()
    assert not client.reachability.unreachable
    assert max(woken) > min(woken), "not all at once"
    await client.reset()


async def test_a_pause_with_a_reachable_server_lasts_its_duration() -> None:
    client = connect(Access(servers=("http://127.0.0.1:1",)))
    began = time.monotonic()
    await client.reachability.pause(0.05)
    assert time.monotonic() - began >= 0.05
    with anyio.fail_after(30):
        await client.reachability.pause()  # no server is away: there is nothing to wait for
