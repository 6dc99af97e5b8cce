"""Fakes: only what a test cares for is given, and everything given is checked."""

from typing import Protocol

import pytest

from lifecycle import GraphError, Hive, NotStartedError, invoke, module, provide, replace
from lifecycle.testing import fake, started

pytestmark = pytest.mark.anyio


class Clock(Protocol):
    zone: str

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class Watch:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock


watch = module("watch", "Tells the time", provide(Watch), invoke(Watch))


async def test_a_fake_takes_one_line() -> None:
    async with started(watch, replace(Clock, fake(Clock, now=lambda: 7.0, zone="UTC"))) as hive:
        clock = hive.get(Watch).clock
        assert (clock.now(), clock.zone) == (7.0, "UTC")


async def test_a_plain_function_stands_for_an_asynchronous_method() -> None:
    slept: list[float] = []
    clock = fake(Clock, sleep=slept.append)
    await clock.sleep(3)
    assert slept == [3]


async def test_calling_a_method_that_the_fake_lacks_raises_an_error() -> None:
    clock = fake(Clock)
    with pytest.raises(AssertionError, match=r"Clock\.now was called, which this fake was not given"):
        clock.now()
    with pytest.raises(AssertionError, match=r"Clock\.sleep was called"):
        await clock.sleep(1)


def test_a_name_the_type_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="Clock has no today"):
        fake(Clock, today=lambda: 7)


def test_a_method_that_is_called_otherwise_is_refused() -> None:
    with pytest.raises(TypeError, match=r"its now.* cannot be called as now"):
        fake(Clock, now=lambda zone: 7.0)


def test_replace_checks_a_handwritten_fake() -> None:
    class Broken:
        def now(self) -> float:
            return 7.0

    with pytest.raises(GraphError, match="it has no sleep"):
        Hive(watch, replace(Clock, Broken())).check()


async def test_a_hive_is_stopped_after_the_started_block() -> None:
    async with started(watch, replace(Clock, fake(Clock))) as hive:
        hive.get(Watch)
    with pytest.raises(RuntimeError, match="starts once"):
        await hive.start()
    with pytest.raises(NotStartedError):
        Hive(watch, replace(Clock, fake(Clock))).get(Watch)
