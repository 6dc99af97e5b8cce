"""What a callback of the event loop raises is logged, and degrades health with when and what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from lifecycle import HealthStatus, Hive


def broken() -> None:
    raise OverflowError("signed integer is greater than maximum")


def faults_in(run: Callable[[Hive], None]) -> tuple[list[HealthStatus], list[Any], Any]:
    """Run this while a hive runs: the hive's health and log, and the loop's handler afterwards."""

    async def main() -> tuple[list[HealthStatus], Any]:
        hive = Hive(name="agent")
        async with hive.started():
            run(hive)
            for _ in range(3):
                await asyncio.sleep(0)
            shown = hive.health.snapshot("agent.event-loop")
        return shown, asyncio.get_running_loop().get_exception_handler()

    with structlog.testing.capture_logs() as logged:
        shown, handler = asyncio.run(main())
    return shown, [line for line in logged if line["log_level"] == "error"], handler


def test_health_shows_what_a_callback_raised_and_when() -> None:
    def run(_: Hive) -> None:
        asyncio.get_running_loop().call_soon(broken)

    shown, logged, handler = faults_in(run)
    (status,) = shown
    assert status.level == "degraded"
    assert status.error == "OverflowError: signed integer is greater than maximum"
    assert "broken" in status.message
    assert "T" in status.message.split(": ")[0], "when"
    (line,) = logged
    assert isinstance(line["exc_info"], OverflowError)
    assert handler is None, "the loop is as it was"


def test_the_last_of_several_is_shown_with_their_number() -> None:
    def run(hive: Hive) -> None:
        del hive
        for _ in range(3):
            asyncio.get_running_loop().call_soon(broken)

    shown, logged, _ = faults_in(run)
    assert shown[0].message.endswith("and 2 before")
    assert len(logged) == 3


def test_without_a_fault_health_has_no_entry() -> None:
    assert faults_in(lambda _: None) == ([], [], None)


@pytest.mark.parametrize("first", ["hive", "other"])
def test_a_handler_that_was_there_is_called_as_well_and_stays(first: str) -> None:
    seen: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(context))
        one, other = Hive(name="hive"), Hive(name="other")
        await one.start()
        await other.start()
        loop.call_soon(broken)
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(hive.health.snapshot(f"{hive.name}.event-loop") for hive in (one, other))
        for hive in sorted((one, other), key=lambda hive: hive.name != first):
            await hive.stop()
        loop.call_soon(broken)
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(seen) == 2
