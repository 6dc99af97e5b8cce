"""Fixtures of the CNI server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.cni_server.fakes import FakeNode
from tests.unit.cni_server.harness import Harness, harness


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """Run a CNI server over a fake node; a namespace's cookie is its file's inode number."""
    monkeypatch.setattr("cells.cni.server.netns_cookie", FakeNode().cookie)
    async with harness(tmp_path) as made:
        yield made
