"""Faults that tests inject, and users by their certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.apiserver import ApiServer, Fault, on
from tests.support.apiserver.certificates import Authority
from tests.unit.apiserver.requests import AUTH, CONFIGMAPS, configmap, get, watch
from tests.unit.apiserver.wire_client import Sent, exchange

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    async with one.serving():
        yield one


async def test_an_answer_can_be_put_in_place_of_the_real_one(server: ApiServer) -> None:
    server.faults.add(Fault(on(CONFIGMAPS), times=2, status=503, headers={"Retry-After": "1"}))
    assert [(await get(server, CONFIGMAPS)).status for _ in range(3)] == [503, 503, 200]


async def test_a_connection_can_be_closed_without_an_answer(server: ApiServer) -> None:
    server.faults.add(Fault(close=True))
    url = f"http://127.0.0.1:{server.port}"
    assert await exchange(url, Sent("GET", CONFIGMAPS, [AUTH])) is None
    assert (await get(server, CONFIGMAPS)).status == 200


async def test_a_stream_can_be_cut_in_the_middle_of_an_event(server: ApiServer) -> None:
    server.add(configmap("a"))
    server.add(configmap("b"))
    server.faults.add(Fault(on(CONFIGMAPS, watch=True), cut_after=1))
    stream = watch(server, CONFIGMAPS)
    assert await stream.over()
    names = [one["object"]["metadata"]["name"] for one in stream.events]
    assert (names[-1], len(names), stream.ended) == ("a", len(names), "closed")
    assert "b" not in names


async def test_a_client_certificate_authenticates_the_user(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    trusted.load_cert_chain(*authority.issue("alice", "/O=dev/CN=alice"))
    server = ApiServer()
    async with server.serving(tls=authority.serving()):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)
        writer.write(f"GET {CONFIGMAPS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
    refused = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (refused["code"], 'User "alice" cannot list' in refused["message"]) == (403, True)
