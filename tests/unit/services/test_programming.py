"""Many frontends at once: each has its own backends, as if programmed alone."""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from random import Random
from typing import Any

import pytest

from cells.services import (
    DEFAULT_SEED,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    Seed,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.maglev import MaglevTables
from cells.services.map_entries import LOOK_UP_TABLES, Batch, read
from cells.services.model.claims import frontends
from lifecycle import BatchError
from tests.support.steps import counted_steps
from tests.unit.services.agent import FakeServiceMaps

pytestmark = pytest.mark.anyio

Led = Mapping[FrontendKey, Mapping[ServiceAddress, BackendState]]


def frontend(number: int, backends: Sequence[Backend], *, version: int = 4) -> Frontend:
    ip = ip_address(f"10.96.{number >> 8}.{number & 255}" if version == 4 else f"fd00::{number:x}")
    key = FrontendKey(ServiceAddress(ip, 80, 6))
    name = ServiceName("shop", f"s{number}")
    return Frontend(key, ServiceType.CLUSTER_IP, name, tuple(sorted(backends, key=lambda one: one.address)))


def backend(number: int, state: BackendState = BackendState.ACTIVE, *, version: int = 4) -> Backend:
    ip = ip_address(f"10.1.{number >> 8}.{number & 255}" if version == 4 else f"fd01::{number:x}")
    return Backend(ServiceAddress(ip, 8080, 6), state)


def some(seed: int, count: int) -> list[Frontend]:
    """Most have backends of their own; some share them, have none, or have some that end."""
    random = Random(seed)  # noqa: S311
    found = []
    for number in range(count):
        version = random.choice((4, 4, 6))
        first = random.choice((20 * number, 20 * number, 20 * random.randrange(count)))
        states = (BackendState.ACTIVE,) * 8 + (BackendState.TERMINATING,)
        own = [
            backend(first + each, random.choice(states), version=version)
            for each in range(random.choice((0, 1, 10, 20)))
        ]
        found.append(frontend(number, own, version=version))
    return found


class HalfRemoving(FakeServiceMaps):
    """Maps of which the kernel removes a backend, and reports an error all the same."""

    def write(self, batch: Batch) -> None:
        super().write(batch)
        if batch.values is None and "_backends_" in batch.map:
            raise OSError(errno.EINTR, "the batch was interrupted")


class Node:
    """The maps of a node, and their writer."""

    def __init__(
        self, last_service_id: int = 65534, maps: FakeServiceMaps | None = None, **options: Any
    ) -> None:
        self.maps, self.served, self.table = maps or FakeServiceMaps(), served_frontends(), frontends()
        given = LoadBalancerOptions(**options)
        maglev = MaglevTables(251, Seed.parse(DEFAULT_SEED)) if given.maglev else None
        balancer = LoadBalancer(given, self.served, maglev, last_service_id=last_service_id)
        self.target = ServicesTarget(self.table, balancer, self.maps, self.served)

    async def started(self, all_of: Sequence[Frontend]) -> None:
        with self.table.txn() as rows:
            rows.replace_all(all_of)
        await self.target.observe()

    async def leads_to(self) -> Led:
        restored = read(await self.maps.dump(), (4, 6))
        return {
            one.frontend.key: {each.address: each.state for each in one.frontend.backends}
            for one in restored.frontends
        }


@pytest.mark.parametrize("seed", range(10))
async def test_frontends_that_come_together_lead_where_they_do_alone(seed: int) -> None:
    every = some(seed, 300)
    together, alone = Node(), Node()
    await together.started(every)
    await alone.started([])
    for one in every:
        await alone.target.put({one.key: one})
    found = await together.leads_to()
    assert found == await alone.leads_to()
    assert {key: set(addresses) for key, addresses in found.items()} == {
        one.key: {each.address for each in one.backends} for one in every
    }


@pytest.mark.parametrize("seed", range(5))
async def test_what_came_together_goes_without_a_trace(seed: int) -> None:
    every = some(seed, 300)
    node = Node()
    await node.started(every)
    await node.target.drop([one.key for one in every])
    assert node.maps.entries == {}


async def test_without_numbers_for_all_as_many_as_fit_are_served() -> None:
    node = Node(last_service_id=4)
    await node.started([])
    every = [frontend(number, [backend(number)]) for number in range(6)]
    with pytest.raises(BatchError) as raised:
        await node.target.put({one.key: one for one in every})
    assert set(raised.value.failures) == {one.key for one in every[4:]}
    assert set(await node.leads_to()) == {one.key for one in every[:4]}
    assert node.maps.backends == {one.backends[0].address[1:] + b"\0\0\0\0\0" for one in every[:4]}


async def test_a_service_with_more_backends_than_fit_keeps_no_other_from_being_served() -> None:
    node = Node()
    few, many = frontend(1, [backend(1)]), frontend(2, [backend(number) for number in range(65536)])
    await node.started([few, many])
    assert set(await node.leads_to()) == {few.key}
    with pytest.raises(BatchError) as raised:
        await node.target.put({many.key: many})
    assert str(raised.value.failures[many.key]) == "10.96.0.2:80 has 65536 backends: 65535 fit"
    less = frontend(2, many.backends[:-1])
    await node.target.put({less.key: less})
    assert {key: len(addresses) for key, addresses in (await node.leads_to()).items()} == {
        few.key: 1,
        less.key: 65535,
    }


@pytest.mark.parametrize("entries", range(0, 120, 7))
async def test_where_the_maps_get_full_nothing_half_served_is_left(entries: int) -> None:
    node = Node()
    await node.started([])
    every = some(entries, 12)
    node.maps.room = entries
    failed: set[FrontendKey] = set()
    try:
        await node.target.put({one.key: one for one in every})
    except BatchError as error:
        failed = set(error.failures)
    served = {one.key: {each.address for each in one.backends} for one in every if one.key not in failed}
    assert {key: set(addresses) for key, addresses in (await node.leads_to()).items()} == served
    assert set(node.served.keys()) == set(served)


async def test_a_backend_with_an_unknown_state_in_the_maps_is_served_by_its_source() -> None:
    one = frontend(1, [backend(1), backend(2)])
    before = Node()
    await before.started([one])
    (where, value), *_ = [each for each in before.maps.entries.items() if "_backends_" in each[0].map]
    before.maps.entries[where] = value[:7] + b"\x09" + value[8:]
    node = Node(maps=before.maps)
    await node.started([one])
    active = BackendState.ACTIVE
    assert await node.leads_to() == {one.key: {each.address: active for each in one.backends}}
    assert node.maps.entries[where] == value


async def test_a_backend_that_was_removed_with_an_error_is_written_again_once_it_is_used() -> None:
    node = Node(maps=HalfRemoving())
    both, one = frontend(1, [backend(1), backend(2)]), frontend(1, [backend(1)])
    await node.started([both])
    with pytest.raises(BatchError):
        await node.target.put({one.key: one})
    await node.target.put({both.key: both})
    assert {key: set(addresses) for key, addresses in (await node.leads_to()).items()} == {
        both.key: {each.address for each in both.backends}
    }


async def test_a_look_up_table_names_the_numbers_that_backends_have_now() -> None:
    node = Node(bpf_lb_algorithm="maglev", bpf_lb_external_clusterip=True)
    one = frontend(1, [backend(1), backend(2)])
    await node.started([one])
    for _ in range(2):  # a backend that comes back has another number
        restored = read(await node.maps.dump(), (4, 6))
        (table,) = (value for where, value in node.maps.entries.items() if where.map in LOOK_UP_TABLES)
        assert {number for (number,) in struct.iter_unpack("<I", table)} == set(restored.backends)
        numbers = set(restored.backends)
        await node.target.drop([one.key])
        await node.target.put({one.key: one})
        assert numbers.isdisjoint(read(await node.maps.dump(), (4, 6)).backends)


async def test_look_up_tables_that_others_delete_come_back_in_the_steps_that_they_took_at_first() -> None:
    node = Node(bpf_lb_algorithm="maglev", bpf_lb_external_clusterip=True)
    some = [frontend(number, [backend(number)]) for number in range(500)]
    with counted_steps() as at_first:
        await node.started(some)
    held = dict(node.maps.entries)
    for where in [each for each in held if each.map in LOOK_UP_TABLES]:
        del node.maps.entries[where]
    with counted_steps() as again:
        await node.target.observe()
    assert node.maps.entries == held
    assert again.lines < 2 * at_first.lines
