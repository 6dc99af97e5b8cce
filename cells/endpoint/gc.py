"""Garbage collection of endpoints: removes endpoints without a link, after pods that ended without a DEL.

A timer checks the links of the ``endpoints`` table and removes an endpoint if two consecutive runs miss its
link.

Why: a runtime that is killed with its pods never calls DEL; addresses, ids and policy maps would leak.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import anyio.to_thread

from cells.endpoint import Endpoint, EndpointAddresses, Endpoints
from cells.netlink.links import is_present
from cells.node.ipam.ranges import IpamError
from lifecycle import (
    Duration,
    Health,
    Jobs,
    Logger,
    Settings,
    Table,
    config,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)

__all__ = ["EndpointGC", "EndpointGCSettings", "LinkPresence", "cell"]


# The interval of the garbage collection.


class EndpointGCSettings(Settings, frozen=True):
    """Interval of the garbage collection of endpoints."""

    endpoint_gc_interval: Duration = minutes(5)
    """Interval between checks for endpoints without a link; missing in two checks, they are removed. 0s:
    never."""

    def faults(self) -> Iterator[str]:
        value = self.endpoint_gc_interval
        if value and value < 1:
            yield f"endpoint-gc-interval={value}: expected 0s, or 1s and more"


# Mark and sweep of endpoints without a link.
#
# Source: Cilium 1.17, endpoint garbage collection: mark and sweep, every endpoint-gc-interval.


class LinkPresence:
    """Checks whether endpoints' links exist."""

    def __init__(self, exists: Callable[[int, str], bool] = is_present) -> None:
        self._exists = exists

    def missing(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Return the ids of endpoints without their links; takes 2 µs per endpoint."""
        return {each.id for each in endpoints if not self._exists(each.ifindex, each.ifname)}


def link_presence() -> LinkPresence:
    """Provide the check on this node's kernel."""
    return LinkPresence()


class EndpointGC:
    """Removes endpoints that have lost their links, periodically."""

    def __init__(
        self,
        settings: EndpointGCSettings,
        table: Table[int, Endpoint],
        endpoints: Endpoints,
        addresses: EndpointAddresses,
        links: LinkPresence,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._table = table
        self._endpoints = endpoints
        self._addresses = addresses
        self._links = links
        self._health = health.child("gc")
        self._log = log
        self._marked: dict[int, float] = {}
        """Endpoints without a link in the last run: id to time of creation."""
        jobs.timer("collect", self.collect, float(settings.endpoint_gc_interval) or math.inf)

    async def collect(self) -> None:
        """Remove endpoints that this run and the last one found without a link; mark the others."""
        endpoints = {each.id: each for each in self._table.all()}
        missing = await anyio.to_thread.run_sync(self._links.missing, list(endpoints.values()))
        marked: dict[int, float] = {}
        for endpoint in (endpoints[number] for number in sorted(missing)):
            if self._marked.get(endpoint.id) == endpoint.created:
                await self._remove(endpoint)
            else:
                marked[endpoint.id] = endpoint.created
        self._marked = marked
        if marked:
            self._health.ok(
                f"endpoints without a link: {', '.join(map(str, marked))}; the next run removes them"
            )
        else:
            self._health.ok("all endpoints have links")

    async def _remove(self, endpoint: Endpoint) -> None:
        problems = self._endpoints.delete(endpoint, release_address=False)
        self._log.warning(
            "endpoint removed: its link was deleted without a CNI DEL",
            endpoint=endpoint.id,
            pod=endpoint.title,
            interface=endpoint.ifname,
            **({"problems": list(problems)} if problems else {}),
        )
        if endpoint.datapath.external_ipam:
            return
        await self._endpoints.wait_scrubbed(endpoint.addresses)
        for address in endpoint.addresses:
            try:
                self._addresses.release(address, endpoint.pool_of(address))
            except IpamError as error:
                self._log.error(
                    "address of a removed endpoint not released", address=str(address), error=error.text
                )


cell = module(
    "endpoint-gc",
    "Garbage collection of endpoints without links",
    config(EndpointGCSettings),
    provide(EndpointGC),
    provide_private(link_presence),
    invoke(EndpointGC),
)
