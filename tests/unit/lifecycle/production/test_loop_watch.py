"""The watchdog of the event loop: what blocks it is logged with its stack, work that gives way is not."""

import io
import time

import anyio
import pytest

from lifecycle import configure_logging
from lifecycle.production import LoopWatchdog, loop_watchdog
from lifecycle.testing import eventually, started

pytestmark = pytest.mark.anyio


def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def test_what_blocks_the_loop_is_logged_with_its_stack() -> None:
    lines = io.StringIO()
    configure_logging("info", "json", lines)
    async with started(loop_watchdog(), settings={"loop-watchdog": 0.05}) as hive:
        watchdog = hive.get(LoopWatchdog)
        await anyio.sleep(0.1)
        assert lines.getvalue() == "", "a loop that turns is no news"
        block_the_loop(0.15)
        await eventually(lambda: watchdog.blocked == 1)
    assert watchdog.longest >= 0.03
    assert "the event loop is blocked" in lines.getvalue()
    assert "in block_the_loop" in lines.getvalue()
    assert "the event loop turns again" in lines.getvalue()


async def test_a_block_at_the_end_does_not_outlive_the_hive() -> None:
    async with started(loop_watchdog(), settings={"loop-watchdog": 0.05}):
        block_the_loop(0.1)


async def test_a_loop_watch_of_0s_disables_the_watchdog() -> None:
    async with started(loop_watchdog(), settings={"loop-watchdog": 0.0}) as hive:
        block_the_loop(0.1)
        assert hive.get(LoopWatchdog).blocked == 0
