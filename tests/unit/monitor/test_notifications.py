"""Agent notifications are sent to the monitor's clients, while there are any."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest

from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.endpoint import Endpoint
from cells.hubble.hubble import NOTIFICATION_BATCH, AgentNotifications, FollowedTables
from cells.kubernetes.objects.core import Node
from cells.observe.events import AgentNotification, Events, decode
from cells.observe.health import AgentReady
from cells.observe.monitor import MonitorClient, monitor_clients
from cells.policy.maps import RealizedPolicy
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from lifecycle import Hive, Table, invoke, provide, replace, supply
from lifecycle.testing import eventually, fake

pytestmark = pytest.mark.anyio

CREATED, UPSERTED, STARTED = 7, 9, 2


class Agent:
    """The tables of an agent, and what it has published."""

    def __init__(self) -> None:
        self.clients = monitor_clients()
        self.endpoints: Table[int, Endpoint] = Table("endpoints", key=lambda row: row.id)
        self.prefixes: Table[str, IpcacheEntry] = Table("ipcache", key=lambda row: row.prefix)
        self.published: list[AgentNotification] = []

    def take(self, data: bytes) -> None:
        notification = decode(data)
        assert isinstance(notification, AgentNotification)
        self.published.append(notification)

    @property
    def kinds(self) -> list[int]:
        return [one.kind for one in self.published]

    def watch(self, number: int) -> None:
        self.clients.put(MonitorClient(number, 1, 0))

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        followed = FollowedTables(
            self.endpoints,
            Table[int, RealizedPolicy]("realized", key=lambda row: row.endpoint_id),
            Ipcache(self.prefixes, cast("Any", None)),
            Table[FrontendKey, ServedFrontend]("services", key=lambda row: row.in_maps.key),
            None,
            Table[tuple[str, str], Node]("nodes", key=lambda row: row.key),
        )
        hive = Hive(
            provide(AgentNotifications),
            invoke(AgentNotifications),
            supply(self.clients, Table[int, MonitorClient]),
            supply(followed),
            supply(AgentReady()),
            replace(Events, fake(Events, publish=self.take)),
        )
        async with hive.started():
            yield


def prefix(number: int) -> IpcacheEntry:
    return IpcacheEntry(
        prefix=f"10.1.{number >> 8}.{number & 255}/32",
        identity=300,
        source=Source.CUSTOM_RESOURCE,
        resource=f"cep/default/pod-{number}",
    )


async def test_a_client_of_before_the_start_sees_it() -> None:
    agent = Agent()
    agent.watch(1)
    async with agent.started():
        await eventually(lambda: agent.kinds == [STARTED])


async def test_clients_see_changes_and_nothing_of_what_was_there() -> None:
    agent = Agent()
    agent.prefixes.put(prefix(0))
    async with agent.started():
        agent.watch(1)
        await anyio.wait_all_tasks_blocked()
        with agent.prefixes.txn() as rows:
            for number in range(1, 3 * NOTIFICATION_BATCH):
                rows.put(prefix(number))
        await eventually(lambda: agent.kinds == [UPSERTED] * (3 * NOTIFICATION_BATCH - 1))
        assert '"cidr":"10.1.0.1/32"' in agent.published[0].text
        assert '"pod-name":"pod-1"' in agent.published[0].text


async def test_without_a_client_nothing_is_made() -> None:
    agent = Agent()
    async with agent.started():
        agent.watch(1)
        agent.watch(2)
        await anyio.wait_all_tasks_blocked()
        agent.clients.delete(1)
        await anyio.wait_all_tasks_blocked()
        agent.prefixes.put(prefix(1))
        await eventually(lambda: agent.kinds == [UPSERTED])
        agent.clients.delete(2)
        await anyio.wait_all_tasks_blocked()
        agent.prefixes.put(prefix(2))
        agent.watch(3)
        await anyio.wait_all_tasks_blocked()
        agent.prefixes.put(prefix(3))
        await eventually(lambda: len(agent.kinds) == 2)
        assert "10.1.0.3/32" in agent.published[1].text
