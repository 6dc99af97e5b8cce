"""Hives that a test starts: they stop at its end and must leave nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lifecycle.hive.hive import Hive
from lifecycle.injection.cells import Cell
from lifecycle.settings.sources import Sources
from lifecycle.testing.leaks import no_leaks
from lifecycle.testing.observed import LIMITS

__all__ = ["HiveStarter"]


class HiveStarter:
    """``await hive(*cells, settings={...})`` is a running hive; the options are those of Hive.

    A hook has five seconds by default, so that a test that hangs fails early.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience
        """Seconds in which what is open at the end of the test may still be closed."""
        self._hives: list[Hive] = []

    async def __call__(
        self, *cells: Cell, settings: Sources | Mapping[str, object] | None = None, **options: Any
    ) -> Hive:
        """Start a hive. Raises as Hive.start() does."""
        hive = Hive(*cells, settings=settings, **(LIMITS | options))
        await hive.start()
        self._hives.append(hive)
        return hive

    @asynccontextmanager
    async def around(self, *, settle: float = 0.0) -> AsyncIterator[None]:
        """Around the test: at its end, stop the hives, the last one first, and check for leaks.

        `settle` seconds pass in between. Raises LeakError, and errors of hives while they ran or stopped.
        """
        async with no_leaks(patience=self.patience):
            try:
                yield
            except BaseException as error:
                for failure in await self._stop():
                    error.add_note(f"and at the end of the test: {failure}")
                raise
            if failures := await self._stop():
                raise failures[0]
            await asyncio.sleep(settle)

    async def _stop(self) -> list[BaseException]:
        failures: list[BaseException] = []
        while self._hives:
            hive = self._hives.pop()
            try:
                await hive.stop()
            except Exception as error:  # noqa: BLE001  # the others stop all the same
                failures.append(error)
            else:
                failures += [] if hive.shutdown.error is None else [hive.shutdown.error]
        return failures
