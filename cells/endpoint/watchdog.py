"""Sees to it that the kernel still holds what endpoints need: programs on their links, rows in maps.

Controller: compares the ``endpoints`` table with the kernel, and has endpoints that differ regenerated.
Why:        no policy restricts a pod without its filter, and nothing else would notice. The kernel
            reports removed filters and changed reverse path filters; everything is compared every 30 seconds.
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


# What the kernel holds of endpoints, against what it should.

STRETCH: Final = 50
"""Endpoints read in one turn of the event loop: about half a millisecond."""

_RTMGRP_TC: Final = 0x8
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
REMOVED: Final = message_filter((of_types(_RTM_DELQDISC, _RTM_DELTFILTER),))


class EndpointFault(StrEnum):
    """What of an endpoint is not as it should be."""

    PROGRAMS = "programs"
    """Those on its link."""
    LXC = "cilium_lxc"
    CONFIG = "hive_endpoints"
    RP_FILTER = "rp_filter"
    """The kernel setting of its link."""


class EndpointKernel(Protocol):
    """The kernel, as far as endpoints depend on it. Methods raise OSError or HiveError."""

    async def faults(self, endpoints: Sequence[Endpoint]) -> Mapping[int, Collection[EndpointFault]]:
        """What is wrong, by endpoint id; of those with a link with which something is."""
        ...

    def accept_any_route(self, endpoint: Endpoint) -> None:
        """Switch reverse path filtering off on the endpoint's link."""
        ...

    def hints(self) -> AsyncIterator[None]:
        """One item at once, then whenever something may have been removed."""
        ...


class KernelState:
    """The real :class:`EndpointKernel`."""

    def __init__(self, datapath: Datapath, maps: Maps, sysctls: Sysctls) -> None:
        self._datapath = datapath
        self._maps = maps
        self._sysctls = sysctls

    async def faults(self, endpoints: Sequence[Endpoint]) -> dict[int, set[EndpointFault]]:
        """Links are read in a worker thread: 0.15 ms each, every 30 seconds."""
        found: dict[int, set[EndpointFault]] = {}
        programs = await anyio.to_thread.run_sync(programs_of, [each.ifindex for each in endpoints])
        endpoints = [each for each in endpoints if is_present(each.ifindex, each.ifname)]
        ours = [each for each in endpoints if not each.datapath.on_anothers_link]
        filtered = await anyio.to_thread.run_sync(partial(self._filtered, ours))
        for position, endpoint in enumerate(endpoints):
            wrong = self._wrong_rows(endpoint)
            if not _equal(programs[endpoint.ifindex], self._programs(endpoint)):
                wrong.add(EndpointFault.PROGRAMS)
            if endpoint.id in filtered:
                wrong.add(EndpointFault.RP_FILTER)
            if wrong:
                found[endpoint.id] = wrong
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()
        return found

    def accept_any_route(self, endpoint: Endpoint) -> None:
        """Raises HiveError."""
        self._sysctls.write({_setting(endpoint): "0"})

    def hints(self) -> AsyncIterator[None]:
        """Filters and queueing disciplines that were removed; those of a deleted link are not reported."""
        return notifications(_RTMGRP_TC, REMOVED)

    def _programs(self, endpoint: Endpoint) -> LinkPrograms:
        return self._datapath.endpoint_programs(egress_prog=endpoint.datapath.egress_prog)

    def _filtered(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Ids of those with a link that filters by reverse path; a deleted link filters nothing."""
        return {each.id for each in endpoints if self._sysctls.read(_setting(each)) not in {"0", None}}

    def _wrong_rows(self, endpoint: Endpoint) -> set[EndpointFault]:
        wrong = set()
        row = lxc_value(endpoint).pack()
        for address in endpoint.addresses:
            present = self._maps.lxc.lookup(LxcKey(address).pack())
            if present != row and not (present and LxcValue.unpack(present).is_host):
                wrong.add(EndpointFault.LXC)
        _, config = config_row(endpoint, any_source=False)
        if _any_source(config) != _any_source(self._maps.endpoints.lookup(ifindex_key(endpoint.ifindex))):
            wrong.add(EndpointFault.CONFIG)
        return wrong


def _any_source(row: bytes | None) -> EndpointConfig | None:
    """The row as if every source were allowed: whether it is depends on the node's settings, too."""
    if row is None:
        return None
    config = EndpointConfig.unpack(row)
    return structs.replace(config, flags=config.flags | ENDPOINT_ANY_SOURCE)


def _equal(present: LinkPrograms, wanted: LinkPrograms) -> bool:
    """Whether a link has what it should; what others attach where we attach nothing is theirs."""
    return all(want in {0, has} for has, want in zip(present, wanted, strict=True))


def _setting(endpoint: Endpoint) -> str:
    return f"net/ipv4/conf/{endpoint.ifname}/rp_filter"


# Compares endpoints with the kernel, and has those that differ regenerated.
#
# Source: Cilium 1.17, the watchdog of endpoints' programs.

REASON = "its state in the kernel was changed"
REST = 0.2
"""Least seconds between two checks: someone may keep removing."""


class EndpointWatchdog:
    """A job that looks every so often, and on the kernel's events; degraded while something is not right."""

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
            self._health.ok(f"{len(endpoints)} endpoints match their state in the kernel")
            return
        self._health.degraded(_summary(wrong))
        errors = [error for number in wrong if (error := await self._heal(endpoints[number], wrong[number]))]
        if errors:
            self._health.degraded(f"{_summary(wrong)}; not repaired: {'; '.join(errors)}")
        else:
            self._timer.trigger()  # only looking shows whether it is right now

    async def _heal(self, endpoint: Endpoint, faults: Collection[EndpointFault]) -> str:
        """What went wrong, empty when nothing did."""
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

    async def _look(self, _: None) -> None:
        self._timer.trigger()


def _summary(faults: Mapping[int, Collection[EndpointFault]]) -> str:
    return "; ".join(f"endpoint {number}: {', '.join(sorted(found))}" for number, found in faults.items())


# How the endpoint watchdog is put together.


def endpoint_kernel(datapath: Datapath, maps: Maps, sysctls: Sysctls) -> EndpointKernel:
    """This node's."""
    return KernelState(datapath, maps, sysctls)


def watchdog_metrics(watchdog: EndpointWatchdog) -> Member[Collector]:
    """What was found, as a metric."""

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
