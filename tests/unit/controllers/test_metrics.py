"""Metrics of controllers: runs by result, and currently failing ones."""

from __future__ import annotations

import pytest

from cells.observe.controllers import Rules, families
from lifecycle.testing import VirtualClock
from tests.unit.controllers.work import Work, running

pytestmark = pytest.mark.anyio


async def test_runs_are_counted_also_of_controllers_that_are_no_more() -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            first = {family.name: family.series for family in families(controllers, ())}
            controllers.update("well", Work(), Rules(interval=10))
            controllers.update("ill", Work(fails=9), Rules(retry_base=100))
            await clock.advance(15)
            then = {family.name: family.series for family in families(controllers, ())}
            controllers.remove("ill")
            controllers.remove("well")
            last = {family.name: family.series for family in families(controllers, ())}
    zero = {("success",): 0, ("failure",): 0}
    runs = {("success",): 2, ("failure",): 1}
    assert first["cilium_controllers_runs_total"] == zero
    assert then["cilium_controllers_runs_total"] == last["cilium_controllers_runs_total"] == runs
    assert then["cilium_controllers_failing"] == {(): 1}
    assert last["cilium_controllers_failing"] == {(): 0}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((), {}),
        (("none",), {}),
        (("retry",), {("retry", "success"): 1, ("retry", "failure"): 1}),
        (("well", "other"), {("well", "success"): 1}),
        (("all",), {("retry", "success"): 1, ("retry", "failure"): 1, ("well", "success"): 1}),
    ],
)
async def test_runs_of_chosen_groups_are_counted_apart(
    groups: tuple[str, ...], expected: dict[tuple[str, str], int]
) -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            controllers.update("well", Work())
            controllers.update("retry-1", Work(fails=1), Rules(retry_base=100), group="retry")
            controllers.update("retry-2", Work(), group="retry")
            await clock.advance(1)
            found = {family.name: family.series for family in families(controllers, groups)}
    assert found["cilium_controllers_group_runs_total"] == expected
