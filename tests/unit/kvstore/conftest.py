"""A real etcd for each test, and parts of an agent that talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.etcd import Etcd, installed


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"  # gRPC's only one


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """gRPC takes a process to have one event loop: what it still has to say of a closed one is an error."""
    yield
    assert anyio_backend


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if not installed():
        pytest.skip("etcd is not installed (etcd-server)")
    found = Etcd(tmp_path / "etcd")
    found.start()
    yield found
    found.kill()
