"""The endpoint watchdog: verifies kernel state of endpoints, and regenerates endpoints that differ.

Compares the ``endpoints`` table with programs on links, entries of hive_endpoints and cilium_lxc, and
rp_filter: every 30 seconds, and when the kernel reports deleted filters.

Why: without its program a pod is not restricted by policy, and no other component would detect it.

Source: Cilium 1.17, the endpoint BPF program watchdog.
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
from cells.endpoint import Endpoint, RegenerationLevel, Regenerations, config_row, ifindex_key, lxc_value
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


# The interval of the comparison.


class WatchdogSettings(Settings, frozen=True):
    """Interval of the verification of endpoints' kernel state."""

    endpoint_bpf_prog_watchdog_interval: Duration = seconds(30)
    """How often endpoints' programs and map entries are compared with the kernel; 0s: only after its
    notifications.
    """

    def faults(self) -> Iterator[str]:
        value = self.endpoint_bpf_prog_watchdog_interval
        if value and value < 1:
            yield f"endpoint-bpf-prog-watchdog-interval={value}: expected 0s, or 1s and more"


# Differences between endpoints and the kernel.

ENDPOINTS_PER_STEP: Final = 50
"""Endpoints compared between two yields to the event loop: about half a millisecond."""

_RTMGRP_TC: Final = 0x8
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
REMOVED: Final = message_filter((of_types(_RTM_DELQDISC, _RTM_DELTFILTER),))


class EndpointFault(StrEnum):
    """A kind of kernel state that differs from the endpoint's row."""

    PROGRAMS = "programs"
    """The programs on its link."""
    LXC = "cilium_lxc"
    CONFIG = "hive_endpoints"
    RP_FILTER = "rp_filter"
    """The sysctl rp_filter of its link."""


class EndpointKernel(Protocol):
    """The interface to endpoints' kernel state. Methods raise OSError or HiveError."""

    async def faults(self, endpoints: Sequence[Endpoint]) -> Mapping[int, Collection[EndpointFault]]:
        """Return the differences by endpoint id, for endpoints with an existing link."""
        ...

    def disable_rp_filter(self, endpoint: Endpoint) -> None:
        """Disable reverse path filtering on the endpoint's link."""
        ...

    def removals(self) -> AsyncIterator[None]:
        """Yield at once, and whenever state may have been removed."""
        ...


class KernelState:
    """Implements :class:`EndpointKernel` by this node's kernel."""

    def __init__(self, datapath: Datapath, maps: Maps, sysctls: Sysctls) -> None:
        self._datapath = datapath
        self._maps = maps
        self._sysctls = sysctls

    async def faults(self, endpoints: Sequence[Endpoint]) -> dict[int, set[EndpointFault]]:
        """Return the differences by endpoint id; reads links in a worker thread, 0.15 ms each."""
        found: dict[int, set[EndpointFault]] = {}
        programs = await anyio.to_thread.run_sync(programs_of, [each.ifindex for each in endpoints])
        endpoints = [each for each in endpoints if is_present(each.ifindex, each.ifname)]
        ours = [each for each in endpoints if not each.datapath.is_chained]
        filtered = await anyio.to_thread.run_sync(partial(self._with_rp_filter, ours))
        for position, endpoint in enumerate(endpoints):
            faults = self._entry_faults(endpoint)
            if not _matches(programs[endpoint.ifindex], self._programs(endpoint)):
                faults.add(EndpointFault.PROGRAMS)
            if endpoint.id in filtered:
                faults.add(EndpointFault.RP_FILTER)
            if faults:
                found[endpoint.id] = faults
            if position % ENDPOINTS_PER_STEP == ENDPOINTS_PER_STEP - 1:
                await anyio.lowlevel.checkpoint()
        return found

    def disable_rp_filter(self, endpoint: Endpoint) -> None:
        """Set the sysctl to 0. Raises HiveError."""
        self._sysctls.write({_setting(endpoint): "0"})

    def removals(self) -> AsyncIterator[None]:
        """Yield after deletions of filters and qdiscs, except those of a deleted link."""
        return notifications(_RTMGRP_TC, REMOVED)

    def _programs(self, endpoint: Endpoint) -> LinkPrograms:
        return self._datapath.endpoint_programs(egress_prog=endpoint.datapath.egress_prog)

    def _with_rp_filter(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Return the ids of endpoints with reverse path filtering on their links."""
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
    """Return the entry with the flag ENDPOINT_ANY_SOURCE, which depends also on the node's settings."""
    if row is None:
        return None
    config = EndpointConfig.unpack(row)
    return structs.replace(config, flags=config.flags | ENDPOINT_ANY_SOURCE)


def _matches(present: LinkPrograms, wanted: LinkPrograms) -> bool:
    """Whether a link has the desired programs; programs of others at other hooks are ignored."""
    return all(want in {0, has} for has, want in zip(present, wanted, strict=True))


def _setting(endpoint: Endpoint) -> str:
    return f"net/ipv4/conf/{endpoint.ifname}/rp_filter"


# The periodic comparison.
#
# Source: Cilium 1.17, the watchdog of endpoints' programs.

REASON = "its kernel state differs"
MIN_INTERVAL = 0.2
"""Minimum number of seconds between two comparisons, in case another program keeps removing state."""


class EndpointWatchdog:
    """Compares endpoints with the kernel, periodically and on notifications; degraded while they differ."""

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
        """Number of differences found since the start, by kind."""
        self._table = table
        self._regenerations = regenerations
        self._kernel = kernel
        self._health = health.child("kernel")
        self._log = log
        interval = float(settings.endpoint_bpf_prog_watchdog_interval) or math.inf
        self._timer = jobs.timer("compare", self.compare, interval, rest=MIN_INTERVAL)
        jobs.observe("watch", kernel.removals, self._trigger)

    async def compare(self) -> None:
        """Compare all endpoints and repair differences. Raises OSError if the kernel cannot be read."""
        # An endpoint that waits for its first identity has no state in the kernel.
        endpoints = {each.id: each for each in self._table.all() if each.identity}
        faults = await self._kernel.faults(list(endpoints.values()))
        differing = {
            number: found
            for number, found in faults.items()
            if (now := self._table.get(number)) is not None and now.created == endpoints[number].created
        }
        if not differing:
            self._health.ok(f"{len(endpoints)} endpoints have their desired kernel state")
            return
        self._health.degraded(_summary(differing))
        healed = [await self._repair(endpoints[number], found) for number, found in differing.items()]
        errors = [error for error in healed if error]
        if errors:
            self._health.degraded(f"{_summary(differing)}; not repaired: {'; '.join(errors)}")
        else:
            self._timer.trigger()  # compare again to verify the repair

    async def _repair(self, endpoint: Endpoint, faults: Collection[EndpointFault]) -> str:
        """Repair an endpoint; return the error, empty if it succeeded."""
        self.found.update(faults)
        what = ", ".join(sorted(faults))
        self._log.warning("kernel state of endpoint differs, regenerating", endpoint=endpoint.id, what=what)
        if EndpointFault.RP_FILTER in faults:
            try:
                self._kernel.disable_rp_filter(endpoint)
            except HiveError as error:
                return str(error)
        if set(faults) == {EndpointFault.RP_FILTER}:
            return ""
        return await self._regenerations.request(endpoint.id, RegenerationLevel.DATAPATH, REASON).result()

    async def _trigger(self, _: None) -> None:
        self._timer.trigger()


def _summary(faults: Mapping[int, Collection[EndpointFault]]) -> str:
    return "; ".join(f"endpoint {number}: {', '.join(sorted(found))}" for number, found in faults.items())


# Assembly of the cell.


def watchdog_metrics(watchdog: EndpointWatchdog) -> Member[Collector]:
    """Provide the number of differences as a metric."""

    async def collect() -> Iterable[MetricFamily]:
        found = {fault.value: watchdog.found[fault] for fault in EndpointFault}
        text = "Endpoints with missing or changed kernel state, by kind of state."
        return [counter("hive_endpoint_watchdog_faults_total", text, found, "what")]

    return Collector("endpoint-watchdog", collect)


cell = module(
    "endpoint-watchdog",
    "Verification and repair of endpoints' kernel state",
    config(WatchdogSettings),
    provide_private(KernelState, as_=(EndpointKernel,)),
    provide(EndpointWatchdog, watchdog_metrics),
    invoke(EndpointWatchdog),
)
