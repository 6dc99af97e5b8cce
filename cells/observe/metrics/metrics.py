"""Who tells metrics, asked one after the other when someone wants to know.

Needs: MetricsSettings, what the hive tells of itself.   Gives: Metrics, Program.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import anyio.lowlevel
import msgspec

from cells.observe.metrics.family import Collector, Family
from cells.observe.metrics.settings import MetricsSettings
from lifecycle import HealthTree, JobMetrics, Logger, Profile, Tables

if TYPE_CHECKING:  # who is never asked imports no more than this
    from cells.observe.metrics.choice import Choice


class Program(msgspec.Struct, frozen=True):
    """Whose process this is; the agent's where nobody says."""

    prefix: str = "cilium"
    """What the names of the process's own metrics begin with."""


class Metrics:
    """All families that the settings let through. Reading them is all that metrics cost.

    What the process and the hive tell is there from the beginning, what cells tell once they have started.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        program: Program | None = None,
        *,
        health: HealthTree,
        jobs: JobMetrics,
        profile: Profile,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._log = log
        self._words = settings.metrics

        async def process() -> Iterable[Family]:
            from cells.observe.metrics.process import families

            return families((program or Program()).prefix)

        async def framework() -> Iterable[Family]:
            from cells.observe.metrics.framework import families

            return families(health, jobs, profile, tables)

        self._collectors = [Collector("process", process), Collector("hive", framework)]

    @cached_property
    def _choice(self) -> Choice:
        from cells.observe.metrics.choice import Choice

        return Choice(self._words)

    def warn_of_settings(self) -> None:
        """Log what the setting ``metrics`` says in vain."""
        for word in self._choice.unsigned:
            self._log.warning(
                f"--metrics flag contains value which does not start with + or -, '{word}', ignoring"
            )

    def add(self, collectors: Iterable[Collector]) -> None:
        """From now on these are asked too."""
        self._collectors.extend(collectors)

    def remove(self, collectors: Iterable[Collector]) -> None:
        """From now on these are not asked any more."""
        for collector in collectors:
            self._collectors.remove(collector)

    async def families(self) -> list[Family]:
        """The current values of every family that is served."""
        return [family for family in await self.every() if self._choice.tells(family)]

    async def every(self) -> list[Family]:
        """Every family there is, told or not. Of a collector that fails none; the log says why."""
        found: list[Family] = []
        for collector in list(self._collectors):
            try:
                found += await collector.collect()
            except Exception as error:  # noqa: BLE001  # one cell's failure must not hide the others' metrics
                if collector in self._collectors:  # else it has stopped
                    self._log.error("metrics could not be collected", of=collector.name, exc_info=error)
            await anyio.lowlevel.checkpoint()  # the loop's others get their turn
        return found
