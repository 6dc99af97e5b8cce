"""Clients of the monitor socket: connecting, disconnecting, slow."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio import connect_unix
from anyio.abc import SocketStream

from cells.observe.events import Events, Lost, Sample, Subscription
from cells.observe.monitor import (
    MAX_CLIENTS,
    PREFACE,
    SOCKET,
    Monitor,
    MonitorClient,
    MonitorSettings,
    Payloads,
    monitor_clients,
)
from lifecycle import Hive, HiveError, config, invoke, provide, replace, supply
from lifecycle.testing import eventually, fake

pytestmark = pytest.mark.anyio


class FakeEvents:
    """Subscriptions that the test notifies."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self.refuse = False

    @contextmanager
    def subscribe(self, room: int | None = None) -> Iterator[Subscription]:
        if self.refuse:
            raise HiveError("no buffers today")
        subscription = Subscription(room or 100)
        self.subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self.subscriptions.remove(subscription)

    def publish(self, *events: Sample | Lost) -> None:
        for subscription in self.subscriptions:
            for event in events:
                subscription.publish(event)


@asynccontextmanager
async def serving(directory: Path, events: FakeEvents, **settings: object) -> AsyncIterator[Monitor]:
    hive = Hive(
        config(MonitorSettings),
        provide(monitor_clients, Monitor),
        invoke(Monitor),
        supply(directory / SOCKET, Path),
        replace(Events, fake(Events, subscribe=events.subscribe)),
        settings=settings,
    )
    async with hive.started():
        yield hive.get(Monitor)


async def some(stream: SocketStream, count: int) -> list[Sample | Lost]:
    payloads = Payloads()
    heard: list[Sample | Lost] = []
    with anyio.fail_after(30):
        while len(heard) < count:
            heard += payloads.feed(await stream.receive())
    return heard


async def test_every_client_hears_every_event(tmp_path: Path) -> None:
    events = FakeEvents()
    async with serving(tmp_path, events) as monitor:
        path = tmp_path / SOCKET
        async with await connect_unix(path) as one, await connect_unix(path) as two:
            await eventually(lambda: monitor.watchers == 2)
            published: list[Sample | Lost] = [Sample(0, b"first"), Sample(3, b"second"), Lost(4, 1)]
            events.publish(*published)
            assert await some(one, 3) == await some(two, 3) == published
        await eventually(lambda: events.subscriptions == [])
        assert monitor.watchers == 0
    assert not path.exists()


async def test_the_table_of_clients_has_their_processes(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeEvents()) as monitor:
        clients = monitor.clients
        async with await connect_unix(tmp_path / SOCKET):
            await eventually(lambda: clients.all() == [MonitorClient(1, os.getpid(), os.getuid())])
        await eventually(lambda: clients.all() == [])
        async with await connect_unix(tmp_path / SOCKET):
            await eventually(lambda: [row.number for row in clients.all()] == [2])


async def test_one_client_too_many_is_turned_away_until_another_goes(tmp_path: Path) -> None:
    events = FakeEvents()
    async with serving(tmp_path, events) as monitor, AsyncExitStack() as stack:
        path = tmp_path / SOCKET
        first, *_ = [await stack.enter_async_context(await connect_unix(path)) for _ in range(MAX_CLIENTS)]
        await eventually(lambda: monitor.watchers == MAX_CLIENTS)
        async with await connect_unix(path) as more:
            with anyio.fail_after(30), pytest.raises(anyio.EndOfStream):
                await more.receive()
        assert len(events.subscriptions) == MAX_CLIENTS
        await first.aclose()
        await eventually(lambda: monitor.watchers == MAX_CLIENTS - 1)
        async with await connect_unix(path) as another:
            await eventually(lambda: monitor.watchers == MAX_CLIENTS)
            events.publish(Lost(4, 1))
            assert await some(another, 1) == [Lost(4, 1)]


async def test_a_client_ends_with_the_agent(tmp_path: Path) -> None:
    events = FakeEvents()
    async with serving(tmp_path, events) as monitor:
        stream = await connect_unix(tmp_path / SOCKET)
        await eventually(lambda: monitor.watchers == 1)
    async with stream:
        with anyio.fail_after(30):
            assert b"".join([part async for part in stream]) == PREFACE


async def test_a_slow_monitor_client_loses_events_and_gets_their_number(tmp_path: Path) -> None:
    events = FakeEvents()
    async with serving(tmp_path, events) as monitor:
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(str(tmp_path / SOCKET))
            await eventually(lambda: monitor.watchers == 1)
            sent = 0
            while events.subscriptions[0].lost == 0:
                for _ in range(50):
                    events.publish(Sample(0, bytes(10_000)))
                    sent += 1
                await anyio.lowlevel.checkpoint()
            events.publish(Lost(5, 0))
            payloads = Payloads()
            heard: list[Sample | Lost] = []
            with anyio.fail_after(30):
                while sum(each.count if isinstance(each, Lost) else 1 for each in heard) < sent + 5:
                    await anyio.wait_readable(client)
                    heard += payloads.feed(client.recv(1 << 20))
            assert any(isinstance(each, Lost) for each in heard)


async def test_a_datapath_that_cannot_be_read_ends_the_client_and_not_the_agent(tmp_path: Path) -> None:
    events = FakeEvents()
    async with serving(tmp_path, events) as monitor:
        events.refuse = True
        async with await connect_unix(tmp_path / SOCKET) as stream:
            with anyio.fail_after(30):
                assert [part async for part in stream] == []
        events.refuse = False
        async with await connect_unix(tmp_path / SOCKET):
            await eventually(lambda: monitor.watchers == 1)


async def test_the_monitor_can_be_disabled(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeEvents(), **{"enable-monitor": "false"}):
        assert not (tmp_path / SOCKET).exists()
