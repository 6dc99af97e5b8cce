"""Large service batches yield to the event loop, and include changes made meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import anyio
import msgspec
import pytest

from cells.kubernetes.objects.core import ENDPOINT_SLICES, EndpointSlice, Node, Service
from cells.kubernetes.resources import INDEXES
from cells.services import LoadBalancerOptions
from cells.services.control.watch import ServiceWatch, WatchedObjects
from cells.services.model.claims import frontends
from cells.services.node_ports import IPAddress, NodePortAddress
from lifecycle import Table
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio

COUNT = 80


@pytest.fixture(autouse=True)
def _time_slices_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lifecycle.jobs.time_slice.LONGEST", 0.0)


def service(number: int, port: int = 80, node_port: int = 0) -> Service:
    metadata = {"namespace": "shop", "name": f"s{number}"}
    ip = f"10.96.0.{number + 1}"
    type_ = "NodePort" if node_port else "ClusterIP"
    ports = [{"port": port, "protocol": "TCP", "nodePort": node_port}]
    spec = {"type": type_, "clusterIP": ip, "clusterIPs": [ip], "ports": ports}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Service)


def endpoints(number: int, address: str = "10.0.0.1") -> EndpointSlice:
    labels = {"kubernetes.io/service-name": f"s{number}"}
    return msgspec.convert(
        {
            "metadata": {"namespace": "shop", "name": f"s{number}-1", "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address]}],
            "ports": [{"port": 8080, "protocol": "TCP"}],
        },
        EndpointSlice,
    )


class World:
    """Tables of objects, and the frontends that follow from them."""

    def __init__(self) -> None:
        self.services: Table[tuple[str, str], Service] = Table("services", key=lambda one: one.key)
        self.slices: Table[tuple[str, str], EndpointSlice] = Table(
            "slices", key=lambda one: one.key, indexes=INDEXES[ENDPOINT_SLICES.qualified]
        )
        nodes: Table[tuple[str, str], Node] = Table("nodes", key=lambda one: one.key)
        self.addresses: Table[IPAddress, NodePortAddress] = Table("addresses", key=lambda one: one.ip)
        self.frontends = frontends()
        objects = WatchedObjects(self.services, self.slices, nodes, addresses=self.addresses)
        self.watch = ServiceWatch(lambda: "node-1", objects, self.frontends, LoadBalancerOptions())
        for number in range(COUNT):
            self.services.put(service(number))
            self.slices.put(endpoints(number))

    @property
    def served(self) -> dict[str, list[str]]:
        return {
            f"{row.key.address.ip}:{row.key.address.port}": [str(one.address.ip) for one in row.backends]
            for row in self.frontends.all()
        }

    @property
    def wanted(self) -> dict[str, list[str]]:
        """What the tables of objects say."""
        found = {}
        for row in self.services.all():
            slice_ = self.slices.get(("shop", f"{row.name}-1"))
            ready = slice_.endpoints[0].addresses if slice_ is not None and slice_.endpoints else None
            assert row.spec.ports is not None
            found[f"{row.spec.cluster_ip}:{row.spec.ports[0].port}"] = list(ready or ())
        return found

    async def largest_step(self, count: int) -> int:
        """Frontends that others see change at once at most, until so many have."""
        sizes: list[int] = []
        async for batch in self.frontends.changes(self.frontends.revision):
            sizes.append(len(batch))
            if sum(sizes) >= count:
                break
        return max(sizes)

    async def disturb(self) -> None:
        """Replace, change and delete services and slices, one at each turn of the event loop."""
        for turn in range(4 * COUNT):
            number = turn * 7 % COUNT
            if turn % 4 == 0:
                self.services.put(service(number, 1000 + turn))
            elif turn % 4 == 1:
                self.slices.put(endpoints(number, f"10.0.1.{turn % 250}"))
            elif turn % 4 == 2:
                self.services.delete(("shop", f"s{number}"))
            else:
                self.slices.delete(("shop", f"s{number}-1"))
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(world.watch.run)
        yield
        group.cancel_scope.cancel()


async def test_at_the_start_others_have_the_event_loop_between_services() -> None:
    world = World()
    async with running(world):
        assert await world.largest_step(COUNT) <= COUNT // 4
        await world.frontends.wait_initialized()
    assert world.served == world.wanted


async def test_the_frontends_are_known_only_with_the_last_service() -> None:
    world, seen = World(), []
    async with running(world):
        while not world.frontends.initialized:
            seen.append(len(world.frontends))
            await anyio.lowlevel.checkpoint()
        assert len(world.frontends) == COUNT
    assert len(set(seen)) > COUNT // 16  # and others saw it fill


async def test_when_all_slices_change_at_once_others_have_the_event_loop_in_between() -> None:
    world = World()
    async with running(world):
        await world.frontends.wait_initialized()
        with world.slices.txn() as rows:
            for number in range(COUNT):
                rows.put(endpoints(number, "10.0.0.2"))
        assert await world.largest_step(COUNT) <= COUNT // 4
    assert world.served == world.wanted


async def test_when_an_address_of_the_node_comes_others_have_the_event_loop_between_node_ports() -> None:
    world = World()
    for number in range(COUNT):
        world.services.put(service(number, node_port=30000 + number))
    async with running(world):
        await world.frontends.wait_initialized()
        before = len(world.frontends)
        world.addresses.put(NodePortAddress(ip_address("192.0.2.1"), "eth0"))
        assert await world.largest_step(COUNT) <= COUNT // 4
        assert len(world.frontends) == before + COUNT


@pytest.mark.parametrize("started", [False, True])
async def test_what_changes_between_two_services_is_served_in_the_end(started: bool) -> None:
    world = World()
    async with running(world):
        if started:
            await world.frontends.wait_initialized()
            with world.services.txn() as rows:
                for number in range(COUNT):
                    rows.put(service(number, 81))
        await world.disturb()
        await eventually(lambda: world.served == world.wanted)
        await world.frontends.wait_initialized()
        assert len(world.served) > COUNT // 2


async def test_frontends_that_are_served_are_replaced_in_one_step_when_the_watch_runs_again() -> None:
    world = World()
    async with running(world):
        await world.frontends.wait_initialized()
    with world.services.txn() as rows:
        for number in range(COUNT // 2):
            rows.put(service(number, 81))
    turns: list[int] = []
    changes = world.frontends.changes(world.frontends.revision)
    async with running(world):
        while not (batch := changes.take()):
            turns.append(1)
            await anyio.lowlevel.checkpoint()
    assert len(batch) == COUNT  # half of them went, and as many came
    assert len(turns) > COUNT // 16, "others had the event loop meanwhile"
    assert world.served == world.wanted
