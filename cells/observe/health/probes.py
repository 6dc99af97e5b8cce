"""Asks parts of the node, again and again, whether they still answer.

For:   StatusCollector.   Needs: Probe members, Controllers, Health.   Gives: Probe, Probes.
Source: Cilium 1.17, the status collector: 5 s between two runs, a warning after 15 s, stale after 60 s. The
agent is not ready before each part was asked once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import anyio
import msgspec

from cells.observe.controllers import Controllers, Rules
from lifecycle import Health, Hook, Lifecycle, Logger, Member

INTERVAL: Final = 5.0
"""Seconds from the end of a run to the next one."""
WARN: Final = 15.0
STALE: Final = 60.0
"""Seconds without an answer after which the part counts as stale."""


class Probe(msgspec.Struct, frozen=True):
    """Something that may stop answering, such as a file system."""

    name: str
    ask: Callable[[], Awaitable[object]]
    """Raises what is wrong. It runs until it answers: nothing cancels it."""


class Probes:
    """Runs every probe as a controller; what is wrong is its failure, and one that hangs is stale.

    Its hook waits until each has answered, whatever it said, or is stale.
    """

    def __init__(
        self,
        probes: list[Member[Probe]],
        controllers: Controllers,
        *,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._health = health
        self._log = log
        self._stale: dict[str, float] = {}
        self._asked = {probe.name: anyio.Event() for probe in probes}
        lifecycle.append(Hook("ask every probe once", self._first, start_timeout=2 * STALE))
        for probe in probes:
            rules = Rules(interval=INTERVAL, retries=False)
            controllers.update(f"status-probe-{probe.name}", partial(self._ask, probe), rules)

    @property
    def stale(self) -> Mapping[str, float]:
        """Since when (Unix seconds) each probe that does not answer has been asked."""
        return self._stale

    async def _first(self) -> None:
        for asked in self._asked.values():
            await asked.wait()

    async def _ask(self, probe: Probe) -> None:
        began, loop, late = time.time(), asyncio.get_running_loop(), False

        def warn() -> None:
            self._log.warning("no response from probe yet", probe=probe.name, seconds=WARN)

        def give_up() -> None:
            nonlocal late
            late = True
            self._stale[probe.name] = began
            self._asked[probe.name].set()
            text = f"no response from {probe.name} probe within {STALE:g} seconds"
            self._health.child(probe.name).degraded(text)
            self._log.error("probe does not answer", probe=probe.name, error=text)

        timers = loop.call_later(WARN, warn), loop.call_later(STALE, give_up)
        try:
            await probe.ask()
        finally:
            for timer in timers:
                timer.cancel()
            self._asked[probe.name].set()
            if not late and self._stale.pop(probe.name, None) is not None:
                self._health.child(probe.name).remove()  # a late answer did not count: this one does
