"""Fixtures: a fake API server, and operators connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.apiserver import ApiServer
from tests.support.operator import Operators


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    one.crd_delay = 0
    async with one.serving():
        yield one


@pytest.fixture
def operators(server: ApiServer, tmp_path: Path) -> Operators:
    return Operators(server, tmp_path)
