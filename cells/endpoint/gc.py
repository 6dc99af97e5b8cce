"""Removes endpoints without a link: their namespaces ended without a DEL.

Controller: checks the links of the ``endpoints`` table; removes an endpoint if two checks miss its link.

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


# Marks endpoints without a link, and removes them at the next check.
#
# Source: Cilium 1.17, endpoint garbage collection: mark and sweep, every endpoint-gc-interval.


class LinkPresence:
    """Checks whether the links of endpoints exist."""

    def __init__(self, exists: Callable[[int, str], bool] = is_present) -> None:
        self._exists = exists

    def missing(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Ids of endpoints without their links; 2 µs per endpoint."""
        return {each.id for each in endpoints if not self._exists(each.ifindex, each.ifname)}


def link_presence() -> LinkPresence:
    """Checks links of this node's kernel."""
    return LinkPresence()


class EndpointGC:
    """Checks the links of endpoints periodically. Pods that are removed by DEL never get here."""

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
        """Endpoints that the last check found without a link: id to time of creation."""
        jobs.timer("collect", self.collect, float(settings.endpoint_gc_interval) or math.inf)

    async def collect(self) -> None:
        """Remove endpoints that this check and the last one found without a link; mark the others."""
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
