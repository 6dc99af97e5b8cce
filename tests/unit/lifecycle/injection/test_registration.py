"""Mistakes are refused where they are made: hooks, jobs, time-outs; with file and line."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import AsyncMock

import anyio
import anyio.lowlevel
import pytest

from lifecycle import (
    Backoff,
    BuildError,
    Hive,
    Hook,
    Jobs,
    Lifecycle,
    StartError,
    invoke,
)

pytestmark = pytest.mark.anyio


def not_async() -> None: ...


def without_hints():  # type: ignore[no-untyped-def]  # as the mistake is made
    return None


def awaitable() -> Awaitable[None]:
    return anyio.lowlevel.checkpoint()


async def rightly() -> None: ...


async def with_argument(_: int) -> None: ...


class Awaited:
    async def __call__(self) -> None: ...


class Plain:
    def __call__(self) -> int:
        return 1


@contextmanager
def synchronous() -> Iterator[None]:
    yield


@asynccontextmanager
async def context() -> AsyncIterator[None]:
    yield


async def generator() -> AsyncIterator[None]:
    yield


def refused(register: Callable[[Lifecycle, Jobs], object]) -> str:
    """The message when a constructor registers this."""

    def build(lifecycle: Lifecycle, jobs: Jobs) -> None:
        register(lifecycle, jobs)

    with pytest.raises(BuildError) as raised:
        Hive(invoke(build)).graph()
    assert isinstance(raised.value.__cause__, TypeError | ValueError)
    assert "tests/unit/lifecycle/injection/test_registration.py:" in str(raised.value.__cause__)
    return str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (not_async, "is not async, it returns None: expected a coroutine function (async def)"),
        (without_hints, "is not async: expected a coroutine function"),
        (functools.partial(not_async), "is not async, it returns None"),
        (Plain(), "is not async, it returns int"),
        (generator, "is a generator"),
        (int, "is a class"),
        (3, "3 cannot be called"),
    ],
)
def test_hooks_and_jobs_that_give_nothing_to_await_are_refused(call: Any, message: str) -> None:
    assert message in refused(lambda lifecycle, _: lifecycle.append(Hook("x", call)))
    assert message in refused(lambda lifecycle, _: lifecycle.append(Hook("x", stop=call)))
    assert message in refused(lambda _, jobs: jobs.one_shot("x", call))
    assert message in refused(lambda _, jobs: jobs.timer("x", call, 1))
    assert message in refused(lambda _, jobs: jobs.observe("x", generator, call))


@pytest.mark.parametrize(
    "call",
    [
        rightly,
        awaitable,
        functools.partial(with_argument, 1),
        Awaited(),
        AsyncMock(),
        lambda: rightly(),  # noqa: PLW0108  # a lambda, which only its call shows
    ],
)
async def test_all_that_can_be_awaited_is_taken(call: Any) -> None:
    def build(lifecycle: Lifecycle, jobs: Jobs) -> None:
        lifecycle.append(Hook("x", call, call))
        jobs.one_shot("x", call)

    async with Hive(invoke(build)).started():
        pass


async def test_a_lambda_hook_that_returns_no_awaitable_fails_the_start() -> None:
    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("x", lambda: None))  # type: ignore[arg-type,return-value]  # the mistake

    expected = r"its start returned None, nothing to await: .* not <lambda> \(.*test_registration.py:124\)"
    with pytest.raises(StartError, match=expected):
        await Hive(invoke(build)).start()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (context(), "is a context manager itself: give the function that makes it"),
        (synchronous, "is not asynchronous: decorate an `async def` with contextlib.asynccontextmanager"),
        (generator, "makes no context manager: decorate it with contextlib.asynccontextmanager"),
        (rightly, "makes no context manager"),
        (int, "is not an asynchronous context manager"),
        (3, "cannot be called"),
    ],
)
def test_what_makes_no_asynchronous_context_manager_is_refused(make: Any, message: str) -> None:
    assert message in refused(lambda lifecycle, _: lifecycle.enter("x", make))


@pytest.mark.parametrize("value", ["5s", True, float("nan"), -1, 0])
def test_odd_numbers_of_seconds_are_refused(value: Any) -> None:
    assert "expected" in refused(
        lambda lifecycle, _: lifecycle.append(Hook("x", rightly, start_timeout=value))
    )
    assert "the stop time-out of hook 'x'" in refused(
        lambda lifecycle, _: lifecycle.enter("x", context, stop_timeout=value)
    )
    assert "the interval of job 'x'" in refused(lambda _, jobs: jobs.timer("x", rightly, value))
    with pytest.raises((TypeError, ValueError), match=r"stop_budget of hive at .*test_registration.py:"):
        Hive(stop_budget=value)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_odd_numbers_of_retries_are_refused(value: Any) -> None:
    assert "retries of job 'x'" in refused(lambda _, jobs: jobs.one_shot("x", rightly, retries=value))


def test_an_invalid_backoff_is_refused() -> None:
    assert "backoff of job 'x'" in refused(lambda _, jobs: jobs.one_shot("x", rightly, backoff=0.5))  # type: ignore[arg-type]  # the mistake
    assert "first of a Backoff" in refused(lambda _, __: Backoff(first=-1))
    assert "factor of a Backoff" in refused(lambda _, __: Backoff(factor=0.5))


@pytest.mark.parametrize("hook", ["open", rightly, Hook(3)])  # type: ignore[arg-type]  # the mistakes
def test_an_invalid_hook_is_refused(hook: Any) -> None:
    assert "expected Hook(name, start, stop)" in refused(lambda lifecycle, _: lifecycle.append(hook))


@pytest.mark.parametrize("items", [[1], rightly, synchronous.__wrapped__])  # type: ignore[attr-defined]  # it has
def test_what_makes_no_asynchronous_iteration_is_refused(items: Any) -> None:
    message = refused(lambda _, jobs: jobs.observe("x", items, with_argument))
    assert "asynchronous iteration" in message or "cannot be called" in message


def test_an_observer_without_a_run_is_refused() -> None:
    assert "is not an Observer: it has no run(health)" in refused(lambda _, jobs: jobs.observe("x", object()))  # type: ignore[call-overload]  # the mistake


def test_two_jobs_of_one_name_in_a_module_are_refused() -> None:
    def register(_: Lifecycle, jobs: Jobs) -> None:
        jobs.one_shot("same", rightly)
        jobs.timer("same", rightly, 1)

    assert (
        "hive has one of this name, added at tests/unit/lifecycle/injection/test_registration.py:"
        in refused(register)
    )
