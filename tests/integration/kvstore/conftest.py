"""Fixtures: an etcd for each test, and one event loop for all tests of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from grpc import aio

from tests.support.etcd import Etcd, installed


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"  # gRPC's only one


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Share one event loop: gRPC delivers late callbacks of a closed loop to the next, where they fail.

    It ends after the last of these callbacks.
    """
    yield
    assert anyio_backend
    async with aio.insecure_channel("127.0.0.1:1") as channel:
        with suppress(aio.AioRpcError):
            await channel.unary_unary("/nobody/there")(b"", timeout=5)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if not installed():
        pytest.fail("etcd is not installed: install Debian's etcd-server")
    found = Etcd(tmp_path / "etcd")
    found.start()
    yield found
    found.kill()
