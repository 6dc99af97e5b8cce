"""Map changes followed over the socket until the agent stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import click
import pytest

from hive.client import follow
from tests.unit.api.node import running_node

pytestmark = pytest.mark.anyio


async def test_a_follower_gets_every_map_change_until_the_agent_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.api.server.SHUTDOWN_SECONDS", 3600.0)  # a stream does not hold up the stop

    async def line(lines: Iterator[Any]) -> Any:
        return await anyio.to_thread.run_sync(next, lines)

    async with running_node(tmp_path) as node:
        log = node.maps.lxc.log
        assert log is not None
        log.note(bytes(20), None)
        lines = follow("/v1/map/cilium_lxc/events?follow=true", node.socket)
        first = await line(lines)
        log.note(bytes(20), None, "ENOENT")
        second = await line(lines)
    assert (first["action"], second["last-error"]) == ("delete", "ENOENT")
    with pytest.raises(click.ClickException, match="has ended the answer"):
        await line(lines)
