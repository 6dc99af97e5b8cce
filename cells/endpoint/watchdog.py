"""Verifies and restores the kernel state of endpoints: programs on their links, entries in maps.

Controller: compares the ``endpoints`` table with the kernel, and regenerates endpoints that differ.
Why:        without its filter a pod is not restricted by policy, and nothing else would notice. The kernel
            reports removed filters; a full comparison runs every 30 seconds.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, Protocol

import anyio.lowlevel
import anyio.to_thread
from msgspec import structs

from cells.base.metrics import Collector, MetricFamily, counter
from cells.datapath.datapath import Datapath
from cells.endpoint import Endpoint, Level, Regenerations, config_row, ifindex_key, lxc_value
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import ENDPOINT_ANY_SOURCE, EndpointConfig, LxcKey, LxcValue
from cells.netlink.connection import message_filter, notifications, of_types
from cells.netlink.links import is_present, programs_of
from cells.netlink.rows import LinkPrograms
from cells.node.sysctl import Sysctls
from lifecycle import (
    Duration,
    Health,
    HiveError,
    Jobs,
    Logger,
    Member,
    Settings,
    Table,
    config,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)

__all__ = ["EndpointFault", "EndpointKernel", "EndpointWatchdog", "WatchdogSettings", "cell"]


# How often endpoints are compared with the kernel.


class WatchdogSettings(Settings, frozen=True):
    """How often endpoints are compared with the kernel."""

    endpoint_bpf_prog_watchdog_interval: Duration = seconds(30)
    """How often programs and map rows of endpoints are compared with the kernel; 0s: only on its
    notifications."""

    def faults(self) -> Iterator[str]:
        value = self.endpoint_bpf_prog_watchdog_interval
        if value and value < 1:
            yield f"endpoint-bpf-prog-watchdog-interval={value}: expected 0s, or 1s and more"


# Differences between endpoints and the kernel.

STRETCH: Final = 50
"""Endpoints compared between two yields to the event loop: about half a millisecond."""

_RTMGRP_TC: Final = 0x8
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
REMOVED: Final = message_filter((of_types(_RTM_DELQDISC, _RTM_DELTFILTER),))


class EndpointFault(StrEnum):
    """A difference between an endpoint and the kernel."""

    PROGRAMS = "programs"
    """Programs on its link."""
    LXC = "cilium_lxc"
    CONFIG = "hive_endpoints"
    RP_FILTER = "rp_filter"
    """The kernel setting of its link."""


class EndpointKernel(Protocol):
    """The kernel state of endpoints. Methods raise OSError or HiveError."""

    async def faults(self, endpoints: Sequence[Endpoint]) -> Mapping[int, Collection[EndpointFault]]:
        """Differences by endpoint id, of endpoints with an existing link."""
        ...

    def accept_any_route(self, endpoint: Endpoint) -> None:
        """Disable reverse path filtering on the endpoint's link."""
        ...

    def hints(self) -> AsyncIterator[None]:
        """Yields at once, and whenever state may have been removed."""
        ...


class KernelState:
    """Implements :class:`EndpointKernel` by this node's kernel."""

    def __init__(self, datapath: Datapath, maps: Maps, sysctls: Sysctls) -> None:
        self._datapath = datapath
        self._maps = maps
        self._sysctls = sysctls

    async def faults(self, endpoints: Sequence[Endpoint]) -> dict[int, set[EndpointFault]]:
        """Differences by endpoint id; links are read in a worker thread: 0.15 ms each."""
        found: dict[int, set[EndpointFault]] = {}
        programs = await anyio.to_thread.run_sync(programs_of, [each.ifindex for each in endpoints])
        endpoints = [each for each in endpoints if is_present(each.ifindex, each.ifname)]
        ours = [each for each in endpoints if not each.datapath.on_anothers_link]
        filtered = await anyio.to_thread.run_sync(partial(self._filtered, ours))
        for position, endpoint in enumerate(endpoints):
            faults = self._entry_faults(endpoint)
            if not _equal(programs[endpoint.ifindex], self._programs(endpoint)):
                faults.add(EndpointFault.PROGRAMS)
            if endpoint.id in filtered:
                faults.add(EndpointFault.RP_FILTER)
            if faults:
                found[endpoint.id] = faults
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()
        return found

    def accept_any_route(self, endpoint: Endpoint) -> None:
        """Raises HiveError."""
        self._sysctls.write({_setting(endpoint): "0"})

    def hints(self) -> AsyncIterator[None]:
        """Yields at removed filters and queueing disciplines, except those of a deleted link."""
        return notifications(_RTMGRP_TC, REMOVED)

    def _programs(self, endpoint: Endpoint) -> LinkPrograms:
        return self._datapath.endpoint_programs(egress_prog=endpoint.datapath.egress_prog)

    def _filtered(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Ids of endpoints with a link that filters by reverse path."""
        return {each.id for each in endpoints if self._sysctls.read(_setting(each)) not in {"0", None}}

    def _entry_faults(self, endpoint: Endpoint) -> set[EndpointFault]:
        faults = set()
        row = lxc_value(endpoint).pack()
        for address in endpoint.addresses:
            present = self._maps.lxc.lookup(LxcKey(address).pack())
            if present != row and not (present and LxcValue.unpack(present).is_host):
                faults.add(EndpointFault.LXC)
        _, config = config_row(endpoint, any_source=False)
        if _any_source(config) != _any_source(self._maps.endpoints.lookup(ifindex_key(endpoint.ifindex))):
            faults.add(EndpointFault.CONFIG)
        return faults


def _any_source(row: bytes | None) -> EndpointConfig | None:
    """The entry as if any source were allowed: that flag depends also on the node's settings."""
    if row is None:
        return None
    config = EndpointConfig.unpack(row)
    return structs.replace(config, flags=config.flags | ENDPOINT_ANY_SOURCE)


def _equal(present: LinkPrograms, wanted: LinkPrograms) -> bool:
    """Whether a link has the desired programs; programs that others attach at other hooks are ignored."""
    return all(want in {0, has} for has, want in zip(present, wanted, strict=True))


def _setting(endpoint: Endpoint) -> str:
    return f"net/ipv4/conf/{endpoint.ifname}/rp_filter"


# The periodic comparison.
#
# Source: Cilium 1.17, the watchdog of endpoints' programs.

REASON = "its state in the kernel was changed"
REST = 0.2
"""Minimum number of seconds between two checks, in case another program keeps removing state."""


class EndpointWatchdog:
    """Compares endpoints with the kernel, periodically and on its events; degraded while they differ."""

    def __init__(
        self,
        settings: WatchdogSettings,
        table: Table[int, Endpoint],
        regenerations: Regenerations,
        kernel: EndpointKernel,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.found: Counter[EndpointFault] = Counter()
        """Number of differences found since the start."""
        self._table = table
        self._regenerations = regenerations
        self._kernel = kernel
        self._health = health.child("kernel")
        self._log = log
        interval = float(settings.endpoint_bpf_prog_watchdog_interval) or math.inf
        self._timer = jobs.timer("compare", self.compare, interval, rest=REST)
        jobs.observe("watch", kernel.hints, self._compare_soon)

    async def compare(self) -> None:
        """Compare every endpoint and repair differences. Raises OSError if the kernel cannot be read."""
        # An endpoint that waits for its first identity has no state in the kernel.
        endpoints = {each.id: each for each in self._table.all() if each.identity}
        faults = await self._kernel.faults(list(endpoints.values()))
        differing = {
            number: found
            for number, found in faults.items()
            if (now := self._table.get(number)) is not None and now.created == endpoints[number].created
        }
        if not differing:
            self._health.ok(f"{len(endpoints)} endpoints match their state in the kernel")
            return
        self._health.degraded(_summary(differing))
        healed = [await self._heal(endpoints[number], found) for number, found in differing.items()]
        errors = [error for error in healed if error]
        if errors:
            self._health.degraded(f"{_summary(differing)}; not repaired: {'; '.join(errors)}")
        else:
            self._timer.trigger()  # compare again: that shows whether the repair succeeded

    async def _heal(self, endpoint: Endpoint, faults: Collection[EndpointFault]) -> str:
        """Repair an endpoint; return the error, empty if it succeeded."""
        self.found.update(faults)
        what = ", ".join(sorted(faults))
        self._log.warning("endpoint was changed in the kernel, repaired", endpoint=endpoint.id, what=what)
        if EndpointFault.RP_FILTER in faults:
            try:
                self._kernel.accept_any_route(endpoint)
            except HiveError as error:
                return str(error)
        if set(faults) == {EndpointFault.RP_FILTER}:
            return ""
        return await self._regenerations.request(endpoint.id, Level.DATAPATH, REASON).result()

    async def _compare_soon(self, _: None) -> None:
        self._timer.trigger()


def _summary(faults: Mapping[int, Collection[EndpointFault]]) -> str:
    return "; ".join(f"endpoint {number}: {', '.join(sorted(found))}" for number, found in faults.items())


# Assembly of the cell.


def endpoint_kernel(datapath: Datapath, maps: Maps, sysctls: Sysctls) -> EndpointKernel:
    """This node's kernel."""
    return KernelState(datapath, maps, sysctls)


def watchdog_metrics(watchdog: EndpointWatchdog) -> Member[Collector]:
    """Metric of the differences found."""

    async def collect() -> Iterable[MetricFamily]:
        found = {fault.value: watchdog.found[fault] for fault in EndpointFault}
        text = "Endpoints with state in the kernel that others changed."
        return [counter("hive_endpoint_watchdog_faults_total", text, found, "what")]

    return Collector("endpoint-watchdog", collect)


cell = module(
    "endpoint-watchdog",
    "Endpoints compared with their state in the kernel",
    config(WatchdogSettings),
    provide_private(endpoint_kernel),
    provide(EndpointWatchdog, watchdog_metrics),
    invoke(EndpointWatchdog),
)
