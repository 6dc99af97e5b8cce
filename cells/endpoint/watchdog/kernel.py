"""What the kernel holds of endpoints, against what it should.

For:    EndpointWatchdog.   Needs: Datapath, Maps, Sysctls.   Gives: EndpointKernel, Fault, KernelState.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, Protocol

import anyio.lowlevel
import anyio.to_thread
from msgspec import structs

from cells.datapath import Datapath
from cells.endpoint import Endpoint, config_row, ifindex_key, lxc_value
from cells.maps import ENDPOINT_ANY_SOURCE, EndpointConfig, LxcKey, LxcValue, Maps
from cells.node.netlink import LinkPrograms, is_present, news, programs_of
from cells.node.sysctl import Sysctls

STRETCH: Final = 50
"""Endpoints whose rows are read before others get their turn on the event loop: about half a millisecond."""

_RTMGRP_TC: Final = 0x8
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
REMOVED: Final = news.passing((news.kinds(_RTM_DELQDISC, _RTM_DELTFILTER),))


class Fault(StrEnum):
    """What of an endpoint is not as it should be."""

    PROGRAMS = "programs"
    """Those on its link."""
    LXC = "cilium_lxc"
    CONFIG = "hive_endpoints"
    RP_FILTER = "rp_filter"
    """The kernel setting of its link."""


class EndpointKernel(Protocol):
    """The kernel, as far as endpoints depend on it. Methods raise OSError or HiveError."""

    async def faults(self, endpoints: Sequence[Endpoint]) -> Mapping[int, Collection[Fault]]:
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

    async def faults(self, endpoints: Sequence[Endpoint]) -> dict[int, set[Fault]]:
        """Links are read in a worker thread: 0.15 ms each, every 30 seconds."""
        found: dict[int, set[Fault]] = {}
        programs = await anyio.to_thread.run_sync(programs_of, [each.ifindex for each in endpoints])
        endpoints = [each for each in endpoints if is_present(each.ifindex, each.ifname)]
        ours = [each for each in endpoints if not each.datapath.on_anothers_link]
        filtered = await anyio.to_thread.run_sync(partial(self._filtered, ours))
        for position, endpoint in enumerate(endpoints):
            wrong = self._wrong_rows(endpoint)
            if not _equal(programs[endpoint.ifindex], self._programs(endpoint)):
                wrong.add(Fault.PROGRAMS)
            if endpoint.id in filtered:
                wrong.add(Fault.RP_FILTER)
            if wrong:
                found[endpoint.id] = wrong
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()
        return found

    def accept_any_route(self, endpoint: Endpoint) -> None:
        """Raises HiveError."""
        self._sysctls.write({_setting(endpoint): "0"})

    def hints(self) -> AsyncIterator[None]:
        """Filters and queueing disciplines that were removed; those of a link that goes are not told."""
        return news.hints(_RTMGRP_TC, REMOVED)

    def _programs(self, endpoint: Endpoint) -> LinkPrograms:
        return self._datapath.endpoint_programs(egress_prog=endpoint.datapath.egress_prog)

    def _filtered(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Ids of those whose links filter by reverse path; a link that is gone filters nothing."""
        return {each.id for each in endpoints if self._sysctls.read(_setting(each)) not in {"0", None}}

    def _wrong_rows(self, endpoint: Endpoint) -> set[Fault]:
        wrong = set()
        row = lxc_value(endpoint).pack()
        for address in endpoint.addresses:
            present = self._maps.lxc.lookup(LxcKey(address).pack())
            if present != row and not (present and LxcValue.unpack(present).is_host):
                wrong.add(Fault.LXC)
        _, config = config_row(endpoint, any_source=False)
        if _any_source(config) != _any_source(self._maps.endpoints.lookup(ifindex_key(endpoint.ifindex))):
            wrong.add(Fault.CONFIG)
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
