"""Removes the conntrack entries of addresses whose endpoints are gone.

For:   Endpoints.   Needs: EndpointMaps, Jobs.   Gives: ConntrackScrub.
Source: Cilium 1.17, the conntrack scrub when an endpoint is deleted.
"""

import math
from collections.abc import Collection

import anyio

from cells.endpoint.kernel.edges import EndpointMaps
from cells.endpoint.table.model import IPAddress
from lifecycle import Jobs, Logger

REST = 0.1
"""Seconds between two walks over the conntrack maps, which keep a processor busy for milliseconds each."""
PATIENCE = 5.0
"""Seconds an address waits for its flows to be forgotten before it is used again all the same."""


class ConntrackScrub:
    """A job that walks over the maps for many addresses at once, so that removing an endpoint never waits."""

    def __init__(self, maps: EndpointMaps, jobs: Jobs, log: Logger) -> None:
        self._maps = maps
        self._log = log
        self._gone: set[IPAddress] = set()
        """Addresses that have flows to forget."""
        self._walked: frozenset[IPAddress] = frozenset()
        """Those whose flows are being forgotten."""
        self._forgotten = anyio.Event()
        self._scrub = jobs.timer("forget-flows", self._forget, math.inf, rest=REST)

    def forget_flows(self, address: IPAddress) -> None:
        """Have the conntrack entries of this address removed soon; many at once cost no more than one."""
        self._gone.add(address)
        self._scrub.trigger()

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once no flow of these addresses is left to forget, or that does not work for a while."""
        with anyio.move_on_after(PATIENCE):
            while not (self._gone | self._walked).isdisjoint(addresses):
                await self._forgotten.wait()

    async def _forget(self) -> None:
        batch = self._walked = frozenset(self._gone)
        self._gone.clear()
        if not batch:
            return
        try:
            removed = await self._maps.forget_flows(batch)
        except BaseException:
            self._gone |= batch  # the job is tried again
            raise
        finally:
            self._walked = frozenset()
        self._forgotten.set()
        self._forgotten = anyio.Event()
        self._log.debug("flows of removed endpoints forgotten", addresses=len(batch), entries=removed)
