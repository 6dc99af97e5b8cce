"""What is done for endpoints in the background: retrying failed regenerations, forgetting old flows.

For:   Endpoints.   Needs: Controllers, Jobs, EndpointMaps.   Gives: Aftercare.
Source: Cilium 1.17, regeneration recovery (n x 2 s, linear) and the conntrack scrub at delete.
"""

import math
from collections.abc import Awaitable, Callable, Collection

import anyio

from cells.controllers import Controllers, Rules
from cells.endpoint.kernel import EndpointMaps
from cells.endpoint.model import IPAddress
from lifecycle import Jobs, Logger

REST = 0.1
"""Seconds between two walks over the conntrack maps, which keep a processor busy for milliseconds each."""
PATIENCE = 5.0
"""Seconds an address waits for its flows to be forgotten before it is used again all the same."""
BACKOFF = 2.0
"""Seconds by which the wait before each further attempt grows."""


class RegenerationError(Exception):
    """Raised when an endpoint could not be built once more."""


def controllers_of(endpoint_id: int) -> str:
    """The owner of the endpoint's controllers."""
    return f"endpoint-{endpoint_id}"


class Aftercare:
    """Runs the slow parts of an endpoint's life as jobs, so that making and removing one never waits."""

    def __init__(self, maps: EndpointMaps, controllers: Controllers, jobs: Jobs, log: Logger) -> None:
        self._maps = maps
        self._controllers = controllers
        self._log = log
        self._recovering: set[int] = set()
        """Endpoints whose last attempt did not work, or is under way."""
        self._recovered: set[int] = set()
        """Endpoints that have the controller: all that ever needed it."""
        self._gone: set[IPAddress] = set()
        """Addresses that have flows to forget."""
        self._walked: frozenset[IPAddress] = frozenset()
        """Those whose flows are being forgotten."""
        self._forgotten = anyio.Event()
        self._scrub = jobs.timer("forget-flows", self._forget, math.inf, rest=REST)

    def recover(self, endpoint_id: int, attempt: Callable[[int], Awaitable[str]]) -> None:
        """Have ``attempt`` made now, and after 2, 4, 6 … seconds, until it says that nothing is wrong."""
        if endpoint_id in self._recovering:
            return
        self._recovering.add(endpoint_id)
        self._recovered.add(endpoint_id)

        async def retry() -> None:
            wrong = await attempt(endpoint_id)
            if wrong:
                raise RegenerationError(f"regeneration recovery failed: {wrong}")
            self._recovering.discard(endpoint_id)

        name = f"endpoint-{endpoint_id}-regeneration-recovery"
        rules = Rules(retry_base=BACKOFF)
        self._controllers.update(name, retry, rules, owner=controllers_of(endpoint_id))

    def gone(self, endpoint_id: int) -> None:
        """The endpoint is no more: nothing is tried for it any longer."""
        if endpoint_id in self._recovered:
            self._recovered.discard(endpoint_id)
            self._recovering.discard(endpoint_id)
            self._controllers.remove_of(controllers_of(endpoint_id))

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
