"""Removes endpoints without a link: their namespaces ended without a DEL.

Controller: looks at the links of the ``endpoints`` table, removes what has had none for a while.
Why:        a runtime that is killed with its pods never calls DEL; addresses, ids and policy maps would be
            lost.
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


# How long an endpoint may be without its link.


class EndpointGCSettings(Settings, frozen=True):
    """How long an endpoint may be without its link."""

    endpoint_gc_interval: Duration = minutes(5)
    """Interval between checks for endpoints without a link; missing in two checks, they are removed. 0s:
    never."""

    def faults(self) -> Iterator[str]:
        value = self.endpoint_gc_interval
        if value and value < 1:
            yield f"endpoint-gc-interval={value}: expected 0s, or 1s and more"


# Marks endpoints without links, and removes those it finds marked at the next look.
#
# Source: Cilium 1.17, endpoint garbage collection: mark and sweep, every endpoint-gc-interval.


class LinkPresence:
    """Which endpoints' links are there."""

    def __init__(self, is_there: Callable[[int, str], bool] = is_present) -> None:
        self._is_there = is_there

    def missing(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Ids of endpoints without their links: 2 us each."""
        return {each.id for each in endpoints if not self._is_there(each.ifindex, each.ifname)}


def link_presence() -> LinkPresence:
    """This node's."""
    return LinkPresence()


class EndpointGC:
    """A job that looks every so often. A pod that goes the usual way is never seen here."""

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
        """Endpoints without links when it looked last: id to time of creation."""
        jobs.timer("collect", self.collect, float(settings.endpoint_gc_interval) or math.inf)

    async def collect(self) -> None:
        """Remove what was without its link last time too, and mark what is so now."""
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
                f"links of endpoints {', '.join(map(str, marked))} have disappeared; the next pass removes"
                " the endpoints"
            )
        else:
            self._health.ok("every endpoint has its link")

    async def _remove(self, endpoint: Endpoint) -> None:
        problems = self._endpoints.delete(endpoint, release_address=False)
        self._log.warning(
            "endpoint removed: its link has disappeared without a DEL",
            endpoint=endpoint.id,
            pod=endpoint.title,
            interface=endpoint.ifname,
            **({"problems": list(problems)} if problems else {}),
        )
        if endpoint.datapath.external_ipam:
            return
        await self._endpoints.forgotten(endpoint.addresses)
        for address in endpoint.addresses:
            try:
                self._addresses.release(address, endpoint.pool_of(address))
            except IpamError as error:
                self._log.error("address not released", address=str(address), error=error.text)


cell = module(
    "endpoint-gc",
    "Endpoints without links, removed",
    config(EndpointGCSettings),
    provide(EndpointGC),
    provide_private(link_presence),
    invoke(EndpointGC),
)
