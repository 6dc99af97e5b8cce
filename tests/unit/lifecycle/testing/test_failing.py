"""Failing each hook in turn: a sound hive passes, and each kind of unsound one is found out."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from lifecycle import Cell, Hook, InnerHive, Jobs, Lifecycle, invoke, module, nest, provide, replace
from lifecycle.testing import fail_each_hook, fake

pytestmark = pytest.mark.anyio


class Store:
    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.enter("open the store", self.opened)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            yield
            group.cancel_scope.cancel()


class Feed:
    def __init__(self, store: Store, lifecycle: Lifecycle, jobs: Jobs) -> None:
        lifecycle.append(Hook("subscribe", anyio.lowlevel.checkpoint, anyio.lowlevel.checkpoint))
        jobs.one_shot("read", anyio.sleep_forever)


class Server:
    def __init__(self, store: Store, feed: Feed, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("serve", anyio.lowlevel.checkpoint))


sound = module("sound", "As it should be", provide(Store, Feed, Server), invoke(Server))


@pytest.mark.parametrize("seed", [None, 1, 2])
async def test_a_sound_hive_ends_cleanly_whichever_hook_fails(seed: int | None) -> None:
    failed = await fail_each_hook(sound, seed=seed)
    assert [(one.hook, one.phase) for one in failed if not one.sequential] == [
        ("open the store", "start"),
        ("open the store", "stop"),
        ("subscribe", "start"),
        ("subscribe", "stop"),
        ("subscribe", "interrupt"),
        ("jobs of Feed", "start"),
        ("jobs of Feed", "stop"),
        ("serve", "start"),
        ("serve", "stop"),
        ("serve", "interrupt"),
    ]
    assert len([one for one in failed if one.sequential]) == 8
    assert {one.module for one in failed} == {"sound"}


async def test_only_the_failures_that_are_asked_for_are_tried() -> None:
    failed = await fail_each_hook(sound, only=lambda one: one.phase == "stop" and not one.sequential)
    assert [str(one) for one in failed] == [
        f"hook {hook!r} (sound) failing to stop, parallel"
        for hook in ("open the store", "subscribe", "jobs of Feed", "serve")
    ]


class Inner(InnerHive):
    """Runs while a hook of the outer hive does."""


class Leader:
    def __init__(self, inner: Inner, lifecycle: Lifecycle) -> None:
        lifecycle.enter("lead", inner.started)


async def test_a_hive_inside_goes_with_the_hook_it_runs_in() -> None:
    outer = module("outer", "Leads", nest(Inner, "inner", "Inside", sound), provide(Leader), invoke(Leader))
    failed = await fail_each_hook(outer)
    assert {one.hook for one in failed} == {"lead"}
    assert {one.phase for one in failed} == {"start", "stop", "interrupt"}


async def test_every_run_gets_fresh_fakes() -> None:
    made = []

    def fakes() -> list[Cell]:
        made.append(fake(Store))
        return [replace(Store, made[-1])]

    failed = await fail_each_hook(sound, fakes=fakes)
    interrupted = {one.hook for one in failed if one.phase == "interrupt"}
    tried_in_vain = len({one.hook for one in failed})  # to interrupt once more than a hook suspends
    assert len(made) == len(failed) + tried_in_vain + 2
    assert interrupted == {"subscribe", "serve"}
    assert "open the store" not in {one.hook for one in failed}


def with_hook(start: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[object]]) -> Cell:
    def extra(server: Server, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("extra", start, stop))

    return invoke(extra)


async def nothing() -> None:
    """As a hook that has nothing to do."""


async def failure(cell: Cell, within: float = 10.0) -> str:
    """The report about a hive with one more hook."""
    with pytest.raises(AssertionError) as caught:
        await fail_each_hook(sound, cell, within=within)
    return str(caught.value)


async def test_a_leaked_task_is_reported_with_its_run() -> None:
    tasks = []

    async def start() -> None:
        tasks.append(asyncio.create_task(anyio.sleep_forever(), name="forgotten"))

    text = await failure(with_hook(start, nothing))
    assert text.startswith("1 of 1 runs were not clean:\n- with no hook failing: LeakError: left behind:")
    assert "task 'forgotten'" in text
    for task in tasks:
        task.cancel()


async def test_a_descriptor_leaked_only_by_a_failing_hook_is_reported() -> None:
    retained: list[int] = []

    async def stop() -> None:
        await anyio.lowlevel.checkpoint()

    class Keeps:
        """Opens at start, and closes only in the stop of another hook, which may not have started."""

        def __init__(self, store: Store, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("open", self.open))
            lifecycle.append(Hook("close", nothing, self.close))

        async def open(self) -> None:
            retained.append(os.open("/dev/null", os.O_RDONLY))

        async def close(self) -> None:
            os.close(retained.pop())

    text = await failure(module("keeps", "Keeps", provide(Keeps), invoke(Keeps)))
    assert "hook 'close' (keeps) failing to start, parallel: LeakError: left behind:" in text
    assert "hook 'close' (keeps) failing to stop" not in text
    for descriptor in retained:
        os.close(descriptor)


async def test_a_descriptor_leaked_by_an_interrupted_start_is_reported() -> None:
    retained: list[int] = []

    async def start() -> None:
        await anyio.lowlevel.checkpoint()
        retained.append(os.open("/dev/null", os.O_RDONLY))
        await anyio.lowlevel.checkpoint()

    async def stop() -> None:
        os.close(retained.pop())

    text = await failure(with_hook(start, stop))
    assert text.startswith("1 of ")
    assert "hook 'extra' (hive) interrupted while starting, where it awaits for time 2: LeakError: " in text
    for descriptor in retained:
        os.close(descriptor)


async def test_a_stop_that_fails_after_another_failure_is_reported() -> None:
    class Fragile:
        def __init__(self, store: Store, lifecycle: Lifecycle) -> None:
            self.ready = False
            lifecycle.append(Hook("prepare", nothing, self.clean))
            lifecycle.append(Hook("go", self.go))

        async def go(self) -> None:
            self.ready = True

        async def clean(self) -> None:
            assert self.ready, "was not ready"

    text = await failure(module("fragile", "Fragile", provide(Fragile), invoke(Fragile)))
    assert "hook 'go' (fragile) failing to start, parallel: AssertionError: other errors came with it" in text
    assert "was not ready" in text
