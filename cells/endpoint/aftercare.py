"""What is done for endpoints in the background: retrying failed regenerations, forgetting old flows.

For:   Endpoints.   Needs: Jobs, EndpointMaps, Health.   Gives: Aftercare.
Source: Cilium 1.17, regeneration recovery (n x 2 s, linear) and the conntrack scrub at delete.
"""

import math
from collections.abc import Callable

import anyio

from cells.endpoint.kernel import EndpointMaps
from cells.endpoint.model import IPAddress
from lifecycle import Health, Jobs, Logger

BACKOFF = 2.0
"""Seconds by which the wait before each further attempt grows."""


class Aftercare:
    """Runs the slow parts of an endpoint's life as jobs, so that making and removing one never waits."""

    def __init__(self, maps: EndpointMaps, jobs: Jobs, health: Health, log: Logger) -> None:
        self._maps = maps
        self._jobs = jobs
        self._health = health
        self._log = log
        self._recovering: set[int] = set()
        self._gone: set[IPAddress] = set()
        self._scrub = jobs.timer("forget-flows", self._forget, math.inf)

    def recover(self, endpoint_id: int, attempt: Callable[[int], bool]) -> None:
        """Call ``attempt`` after 2, 4, 6 … seconds until it is True; at most one such job for an endpoint."""
        if endpoint_id in self._recovering:
            return
        self._recovering.add(endpoint_id)
        name = f"endpoint-{endpoint_id}-regeneration-recovery"

        async def retry() -> None:
            try:
                tries = 0
                worked = False
                while not worked:
                    tries += 1
                    pause = tries * BACKOFF
                    message = f"regeneration failed {tries} times, next try after {pause:g} s"
                    self._health.child(name).degraded(message)
                    await anyio.sleep(pause)
                    worked = attempt(endpoint_id)
            finally:
                self._recovering.discard(endpoint_id)

        self._jobs.one_shot(name, retry)

    def forget_flows(self, address: IPAddress) -> None:
        """Have the conntrack entries of this address removed soon; many at once cost no more than one."""
        self._gone.add(address)
        self._scrub.trigger()

    async def _forget(self) -> None:
        batch, self._gone = self._gone, set()
        if not batch:
            return
        try:
            removed = await self._maps.forget_flows(batch)
        except OSError:
            self._gone |= batch  # the job is tried again
            raise
        self._log.debug("flows of removed endpoints forgotten", addresses=len(batch), entries=removed)
