"""A controller with work that fails on request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from cells.observe.controllers import Controllers
from lifecycle import Hive, invoke, module, provide


class Work:
    """Records its runs; fails a given number of times."""

    def __init__(self, fails: int = 0) -> None:
        self.times: list[float] = []
        self.fails = fails

    async def __call__(self) -> None:
        self.times.append(anyio.current_time())
        if self.fails:
            self.fails -= 1
            raise OSError(12, "no memory today")

    @property
    def pauses(self) -> list[float]:
        return [round(after - before, 3) for before, after in zip(self.times, self.times[1:], strict=False)]


def _needed(_: Controllers) -> None:
    """Depend on it."""


@asynccontextmanager
async def running() -> AsyncIterator[Controllers]:
    cell = module("controllers", "over jobs", provide(Controllers), invoke(_needed))
    async with Hive(cell).started() as hive:
        yield hive.get(Controllers)
