"""What happens to endpoints in the background."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address

import anyio
import pytest

from cells.controllers import Controllers
from cells.endpoint import EndpointMaps
from cells.endpoint.aftercare import Aftercare
from lifecycle import HealthTree, Hive, invoke, module, provide, supply
from tests.unit.endpoint.fakes import FakeKernel

pytestmark = pytest.mark.anyio
ONE, TWO = IPv4Address("10.0.1.1"), IPv4Address("10.0.1.2")


def _needed(_: Aftercare) -> None:
    """Ask for it."""


@asynccontextmanager
async def running(kernel: FakeKernel) -> AsyncIterator[Hive]:
    cell = module(
        "endpoint",
        "aftercare",
        supply(kernel, EndpointMaps),
        provide(Controllers, Aftercare),
        invoke(_needed),
    )
    async with Hive(cell).started() as hive:
        yield hive


async def until(kernel: FakeKernel, steps: int) -> None:
    """Wait until the kernel was asked so often."""
    with anyio.fail_after(5):
        while len(kernel.steps) < steps:  # noqa: ASYNC110  (a fake has no event to wait for)
            await anyio.sleep(0.001)


async def test_flows_of_many_addresses_are_forgotten_at_once() -> None:
    kernel = FakeKernel()
    async with running(kernel) as hive:
        hive.get(Aftercare).forget_flows(ONE)
        hive.get(Aftercare).forget_flows(TWO)
        await until(kernel, 1)
    assert sorted(kernel.forgotten) == [ONE, TWO]
    assert kernel.steps == ["forget_flows"]


async def test_flows_that_could_not_be_forgotten_are_tried_again() -> None:
    kernel = FakeKernel(refuse="forget_flows")
    async with running(kernel) as hive:
        hive.get(Aftercare).forget_flows(ONE)
        await until(kernel, 1)
        kernel.refuse = ""
        await until(kernel, 2)
    assert kernel.forgotten == [ONE]


async def test_a_regeneration_is_tried_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.endpoint.aftercare.BACKOFF", 0.001)
    answers = ["no", "not yet", ""]
    asked: list[int] = []
    done = anyio.Event()

    async def attempt(endpoint_id: int) -> str:
        asked.append(endpoint_id)
        if len(asked) == len(answers):
            done.set()
        return answers[len(asked) - 1]

    async with running(FakeKernel()) as hive:
        aftercare, controllers = hive.get(Aftercare), hive.get(Controllers)
        aftercare.recover(7, attempt)
        aftercare.recover(7, attempt)
        with anyio.fail_after(5):
            await done.wait()
            await anyio.wait_all_tasks_blocked()
        (found,) = controllers.of("endpoint-7")
        assert (found.name, found.failures, found.successes) == ("endpoint-7-regeneration-recovery", 2, 1)
        assert asked == [7, 7, 7]
        aftercare.gone(7)
        await anyio.wait_all_tasks_blocked()
        assert controllers.of("endpoint-7") == ()
        statuses = hive.get(HealthTree).snapshot()
    assert not [each for each in statuses if "endpoint-7-regeneration-recovery" in each.module]
