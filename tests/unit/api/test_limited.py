"""Rate limits as clients of the API meet them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lifecycle.testing import eventually
from tests.unit.api.node import Node, running_node
from tests.unit.api.series import series

pytestmark = pytest.mark.anyio

ONCE = "rate-limit:1/h,rate-burst:1,skip-initial:0,auto-adjust:false"
"""One request, and none after it for an hour."""
NOT_LATER = f"{ONCE},max-wait-duration:1s"
REFUSED = "request would have to wait "


@asynccontextmanager
async def waiting(node: Node, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A request that waits in its line; the connection is closed at the end."""
    reader, writer = await asyncio.open_unix_connection(node.socket)
    writer.write(request)
    try:
        await eventually(lambda: any(limiter.waiting for limiter in node.limits.limiters.values()))
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def processed(node: Node) -> dict[tuple[str, str, str], float]:
    """Requests by limiter, outcome and status."""
    found: list[Any] = await series(node, "cilium_api_limiter_processed_requests_total")
    return {tuple(one["labels"].values()): one["value"] for one in found}


@pytest.mark.parametrize(
    ("limiter", "method", "path"),
    [
        ("endpoint-create", "PUT", "/v1/endpoint/cilium-local:0"),
        ("endpoint-delete", "DELETE", "/v1/endpoint/7"),
        ("endpoint-delete", "DELETE", "/v1/endpoint"),
        ("endpoint-get", "GET", "/v1/endpoint/7"),
        ("endpoint-get", "GET", "/v1/endpoint/7/healthz"),
        ("endpoint-get", "GET", "/v1/endpoint/7/log"),
        ("endpoint-get", "GET", "/v1/endpoint/7/labels"),
        ("endpoint-get", "GET", "/v1/endpoint/7/config"),
        ("endpoint-patch", "PATCH", "/v1/endpoint/7/labels"),
        ("endpoint-patch", "PATCH", "/v1/endpoint/7/config"),
        ("endpoint-list", "GET", "/v1/endpoint"),
    ],
)
async def test_too_many_requests_are_answered_429(
    limiter: str, method: str, path: str, tmp_path: Path
) -> None:
    async with running_node(tmp_path, settings={"api-rate-limit": f"{limiter}={NOT_LATER}"}) as node:
        first = await node.ask(method, path)
        got = await node.ask(method, path)
        assert first.status not in {429, 500}
        assert (got.status, got.headers["Content-Type"]) == (429, "application/json")
        assert got.body.startswith(REFUSED)
        counted = await processed(node)
    outcome = ("success", "200") if first.status < 400 else ("fail", str(first.status))
    assert counted == {(limiter, *outcome): 1, (limiter, "fail-limit-wait", "429"): 1}


async def test_other_operations_are_never_limited(tmp_path: Path) -> None:
    limits = ",".join(f"{name}={NOT_LATER}" for name in ("endpoint-get", "endpoint-list"))
    async with running_node(tmp_path, settings={"api-rate-limit": limits}) as node:
        for _ in range(60):
            assert (await node.ask("GET", "/v1/config")).status == 200
            assert (await node.ask("GET", "/v1/healthz")).status == 200
        assert await processed(node) == {}


async def test_a_client_that_hangs_up_leaves_its_line(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings={"api-rate-limit": f"endpoint-list={ONCE}"}) as node:
        assert (await node.ask("GET", "/v1/endpoint")).status == 200
        async with waiting(node, b"GET /v1/endpoint HTTP/1.1\r\nHost: x\r\n\r\n"):
            pass
        await eventually(lambda: not node.limits.limiters["endpoint-list"].waiting)
        assert await processed(node) == {
            ("endpoint-list", "success", "200"): 1,
            ("endpoint-list", "request-cancelled", "429"): 1,
        }


async def test_a_stop_releases_waiting_requests(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with running_node(tmp_path, settings={"api-rate-limit": f"endpoint-list={ONCE}"}) as node:
            assert (await node.ask("GET", "/v1/endpoint")).status == 200
            request = b"GET /v1/endpoint HTTP/1.1\r\nHost: x\r\n\r\n"
            reader = await clients.enter_async_context(waiting(node, request))
            stopping = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - stopping < 2
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert json.loads(body) == "request cancelled while waiting for rate limiting slot"


async def test_refused_requests_take_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.api.server.may_change", lambda _: False)
    settings = {"enable-cilium-api-server-access": "GetConfig,DeleteEndpoint"}
    async with running_node(tmp_path, settings=settings) as node:
        assert (await node.ask("GET", "/v1/endpoint")).status == 403
        assert (await node.ask("DELETE", "/v1/endpoint", {"container-id": "x"})).status == 403
        assert all(not limiter.processed for limiter in node.limits.limiters.values())
