"""Leader election: one of several candidates holds a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest
import structlog

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.kubernetes.leases import LEASES, Election
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Fault, on

pytestmark = pytest.mark.anyio
NAMESPACE = "kube-system"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    async with one.serving():
        yield one


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    made = connect(Access(servers=(f"http://127.0.0.1:{server.port}",), token=ADMIN_TOKEN), qps=0)
    yield made
    await made.reset()


class Candidate:
    """A candidate that wants to lead."""

    def __init__(self, client: Client, name: str) -> None:
        log = structlog.get_logger()
        self.election = Election(client, "lock", NAMESPACE, name, log, duration=1.0, deadline=0.5, retry=0.02)
        self.leads = False
        self.task = asyncio.create_task(self.election.run(self._work))

    async def _work(self) -> None:
        self.leads = True
        try:
            await anyio.sleep_forever()
        finally:
            self.leads = False

    async def stop(self) -> None:
        """As when its process ends in order."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_a_released_lease_is_acquired_by_the_next(client: Client) -> None:
    one = Candidate(client, "one")
    await eventually(lambda: one.leads)
    two = Candidate(client, "two")
    await eventually(lambda: two.election.leader == "one")
    assert not two.leads
    await one.stop()
    await eventually(lambda: two.leads)
    lease = await client.get(LEASES, "lock", NAMESPACE)
    assert lease.spec.holder_identity == "two"
    assert lease.spec.lease_transitions == 1
    await two.stop()
    assert (await client.get(LEASES, "lock", NAMESPACE)).spec.holder_identity == ""


async def test_a_leader_that_cannot_renew_stops_before_another_begins(
    server: ApiServer, client: Client
) -> None:
    one = Candidate(client, "one")
    await eventually(lambda: one.leads)
    server.faults.add(Fault(on("/apis/coordination.k8s.io"), times=-1, status=500))
    await eventually(one.task.done)
    assert not one.leads
    server.faults.clear()
    two = Candidate(client, "two")
    await eventually(lambda: two.leads, within=30)
    await two.stop()


async def test_a_lease_acquired_by_another_holder_is_lost(server: ApiServer, client: Client) -> None:
    one = Candidate(client, "one")
    await eventually(lambda: one.leads)
    taken = {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 60}}
    await client.patch(LEASES, "lock", taken, NAMESPACE)
    await eventually(one.task.done)
    assert not one.leads
    assert (await client.get(LEASES, "lock", NAMESPACE)).spec.holder_identity == "thief"
