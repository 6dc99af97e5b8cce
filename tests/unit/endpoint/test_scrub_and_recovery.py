"""Background work on endpoints: scrubbing of maps and recovery."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address

import anyio
import pytest

from cells.endpoint import EndpointMaps
from cells.endpoint.creation import RegenerationRecovery
from cells.endpoint.kernel import SCRUB_TIMEOUT, ConntrackScrub
from cells.observe.controllers import Controllers
from lifecycle import HealthTree, Hive, invoke, module, provide, supply
from lifecycle.testing import VirtualClock, eventually
from tests.unit.endpoint.fakes import FakeKernel

pytestmark = pytest.mark.anyio
ONE, TWO = IPv4Address("10.0.1.1"), IPv4Address("10.0.1.2")


def _needed(_: ConntrackScrub, __: RegenerationRecovery) -> None:
    """Ask for it."""


@asynccontextmanager
async def running(kernel: FakeKernel) -> AsyncIterator[Hive]:
    cell = module(
        "endpoint",
        "endpoint",
        supply(kernel, EndpointMaps),
        provide(Controllers, ConntrackScrub, RegenerationRecovery),
        invoke(_needed),
    )
    async with Hive(cell).started() as hive:
        yield hive


async def until(kernel: FakeKernel, steps: int) -> None:
    """Wait until the kernel was asked so often."""
    await eventually(lambda: len(kernel.steps) >= steps)


async def test_flows_of_many_addresses_are_forgotten_at_once() -> None:
    kernel = FakeKernel()
    async with running(kernel) as hive:
        hive.get(ConntrackScrub).scrub_conntrack(ONE)
        hive.get(ConntrackScrub).scrub_conntrack(TWO)
        await until(kernel, 1)
    assert sorted(kernel.forgotten) == [ONE, TWO]
    assert kernel.steps == ["scrub_conntrack"]


async def test_flows_that_could_not_be_forgotten_are_tried_again() -> None:
    kernel = FakeKernel(refuse="scrub_conntrack")
    async with running(kernel) as hive:
        hive.get(ConntrackScrub).scrub_conntrack(ONE)
        await until(kernel, 1)
        kernel.refuse = ""
        await until(kernel, 2)
    assert kernel.forgotten == [ONE]


async def test_an_address_waits_until_its_flows_are_forgotten_and_no_other_does() -> None:
    kernel = FakeKernel(refuse="scrub_conntrack")
    waited: list[IPv4Address] = []

    async def wait(scrub: ConntrackScrub, address: IPv4Address) -> None:
        await scrub.wait_scrubbed([address])
        waited.append(address)

    with VirtualClock() as clock:
        async with running(kernel) as hive, anyio.create_task_group() as tasks:
            scrub = hive.get(ConntrackScrub)
            scrub.scrub_conntrack(ONE)
            await clock.advance(0.01)
            for address in (ONE, TWO):
                tasks.start_soon(wait, scrub, address)
            await clock.advance(0.01)
            assert waited == [TWO]
            kernel.refuse = ""
            await clock.advance(2)
            assert waited == [TWO, ONE]


async def test_what_cannot_be_forgotten_does_not_keep_an_address_for_ever() -> None:
    over = anyio.Event()

    async def wait(scrub: ConntrackScrub) -> None:
        await scrub.wait_scrubbed([ONE])
        over.set()

    with VirtualClock() as clock:
        async with running(FakeKernel(refuse="scrub_conntrack")) as hive, anyio.create_task_group() as tasks:
            hive.get(ConntrackScrub).scrub_conntrack(ONE)
            tasks.start_soon(wait, hive.get(ConntrackScrub))
            await clock.advance(SCRUB_TIMEOUT - 0.1)
            assert not over.is_set()
            await clock.advance(0.2)
            assert over.is_set()


async def test_pods_that_go_one_after_the_other_do_not_cost_a_walk_each() -> None:
    kernel = FakeKernel()
    with VirtualClock() as clock:
        async with running(kernel) as hive:
            scrub = hive.get(ConntrackScrub)
            for number in range(100):
                scrub.scrub_conntrack(IPv4Address(f"10.0.1.{number}"))
                await clock.advance(0.0015)
                assert kernel.forgotten, "the first one waits for nothing"
            await clock.advance(0.1)
    assert len(kernel.forgotten) == 100
    assert len(kernel.steps) <= 3


async def test_a_regeneration_is_tried_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.endpoint.creation.BACKOFF", 0.001)
    answers = ["no", "not yet", ""]
    asked: list[int] = []
    done = anyio.Event()

    async def attempt(endpoint_id: int) -> str:
        asked.append(endpoint_id)
        if len(asked) == len(answers):
            done.set()
        return answers[len(asked) - 1]

    async with running(FakeKernel()) as hive:
        recovery, controllers = hive.get(RegenerationRecovery), hive.get(Controllers)
        recovery.recover(7, attempt)
        recovery.recover(7, attempt)
        with anyio.fail_after(30):
            await done.wait()
            await anyio.wait_all_tasks_blocked()
        (found,) = controllers.of("endpoint-7")
        assert (found.name, found.failures, found.successes) == ("endpoint-7-regeneration-recovery", 2, 1)
        assert asked == [7, 7, 7]
        recovery.removed(7)
        await anyio.wait_all_tasks_blocked()
        assert controllers.of("endpoint-7") == ()
        statuses = hive.get(HealthTree).snapshot()
    assert not [each for each in statuses if "endpoint-7-regeneration-recovery" in each.module]
