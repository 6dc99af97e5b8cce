"""Stored events over the socket, as ``hive monitor`` reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import click
import pytest

from cells.hubble.hubble import Hubble
from hive.observe.monitor_history import RecordedEvent, stored_and_live
from lifecycle import supply
from tests.unit.api.node import running_node
from tests.unit.hubble.holding import HoldingHubble

pytestmark = pytest.mark.anyio


async def test_past_events_have_the_names_of_their_time_and_others_follow_until_the_agent_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.api.server.SHUTDOWN_SECONDS", 3600.0)  # a stream does not hold up the stop
    hubble = HoldingHubble()

    async def seen(found: Iterator[RecordedEvent]) -> RecordedEvent:
        return await anyio.to_thread.run_sync(next, found)

    async with running_node(tmp_path, more=[supply(hubble, Hubble)]) as node:
        hubble.drop()
        began = time.time_ns()
        hubble.drop()
        hubble.drop()
        found = stored_and_live(node.socket, None, 2, lambda _: True, named=True)
        newest = [await seen(found), await seen(found)]
        assert all(one.time.timestamp() * 1e9 > began - 1000 for one in newest)
        names = newest[0].names or {}
        assert "default/web-7d4b9c6f5-abcde" in names["pods"].values()
        assert "default/web-7d4b9c6f5-abcde" in names["endpoints"].values()
        hubble.drop()
        assert (await seen(found)).names is None
        since = stored_and_live(node.socket, began, None, lambda _: True, named=False)
        assert [(await seen(since)).names for _ in range(3)] == [None] * 3
    for stream in (found, since):
        with pytest.raises(click.ClickException, match="has ended the answer"):
            await seen(stream)


async def test_without_hubble_events_are_refused_with_the_setting_to_enable(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        found = stored_and_live(node.socket, None, 2, lambda _: True, named=True)
        with pytest.raises(click.ClickException, match=r"keeps no past events: set enable-hubble=true"):
            await anyio.to_thread.run_sync(next, found)
