"""Hooks that log their starts and stops, and first do what a test defines."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from lifecycle import Hook, Lifecycle

log: list[str] = []
"""Starts (``name +``) and stops (``name -``), in order."""
behaviour: dict[str, Callable[[], Awaitable[object]]] = {}
"""What happens before such a line is written, such as a failure: then it is not."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    log.clear()
    behaviour.clear()


async def act(what: str) -> None:
    await anyio.lowlevel.checkpoint()
    if what in behaviour:
        await behaviour[what]()
    log.append(what)


async def boom() -> None:
    raise OSError("boom")


def hook(lifecycle: Lifecycle, name: str) -> None:
    lifecycle.append(Hook(name, lambda: act(f"{name} +"), lambda: act(f"{name} -")))
