"""Compares endpoints with the kernel, and has those that differ regenerated.

For:   the agent.   Needs: Table[Endpoint], Regenerations, EndpointKernel, Jobs, Health.
Gives: EndpointWatchdog.
Source: Cilium 1.17, the watchdog of endpoints' programs.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping

from cells.endpoint import Endpoint, Level, Regenerations
from cells.endpoint.watchdog.kernel import EndpointKernel, Fault
from cells.endpoint.watchdog.settings import WatchdogSettings
from lifecycle import Health, HiveError, Jobs, Logger, Table

REASON = "what the kernel holds of it was changed"
REST = 0.2
"""Least seconds between two checks: someone may keep removing."""


class EndpointWatchdog:
    """A job that looks every so often, and when the kernel tells; degraded while something is not right."""

    def __init__(
        self,
        settings: WatchdogSettings,
        table: Table[Endpoint],
        regenerations: Regenerations,
        kernel: EndpointKernel,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.found: Counter[Fault] = Counter()
        """How often what was found wrong since the start."""
        self._table = table
        self._regenerations = regenerations
        self._kernel = kernel
        self._health = health.child("kernel")
        self._log = log
        interval = float(settings.endpoint_bpf_prog_watchdog_interval) or math.inf
        self._timer = jobs.timer("compare", self.compare, interval, rest=REST)
        jobs.observe("watch", kernel.hints, self._look)

    async def compare(self) -> None:
        """Compare every endpoint, and make right what is not. Raises OSError if the kernel cannot be read."""
        # Of one that waits for its identity there is nothing in the kernel yet.
        endpoints = {each.id: each for each in self._table.all() if each.identity}
        faults = await self._kernel.faults(list(endpoints.values()))
        wrong = {
            number: found
            for number, found in faults.items()
            if (now := self._table.get(number)) is not None and now.created == endpoints[number].created
        }
        if not wrong:
            self._health.ok(f"{len(endpoints)} endpoints are as they should be")
            return
        self._health.degraded(_summary(wrong))
        errors = [error for number in wrong if (error := await self._heal(endpoints[number], wrong[number]))]
        if errors:
            self._health.degraded(f"{_summary(wrong)}; not put right: {'; '.join(errors)}")
        else:
            self._timer.trigger()  # only looking tells whether it is right now

    async def _heal(self, endpoint: Endpoint, faults: Collection[Fault]) -> str:
        """What went wrong, empty when nothing did."""
        self.found.update(faults)
        what = ", ".join(sorted(faults))
        self._log.warning("endpoint was changed in the kernel, made right", endpoint=endpoint.id, what=what)
        if Fault.RP_FILTER in faults:
            try:
                self._kernel.accept_any_route(endpoint)
            except HiveError as error:
                return str(error)
        if set(faults) == {Fault.RP_FILTER}:
            return ""
        return await self._regenerations.request(endpoint.id, Level.DATAPATH, REASON).result()

    async def _look(self, _: None) -> None:
        self._timer.trigger()


def _summary(faults: Mapping[int, Collection[Fault]]) -> str:
    return "; ".join(f"endpoint {number}: {', '.join(sorted(found))}" for number, found in faults.items())
