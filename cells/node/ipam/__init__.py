"""IPAM: addresses of this node's pods, from ranges per address family, or from pools of ranges.

Controller: allocations are in memory; endpoints store their addresses on disk and claim them again after a
restart. The ranges in use are saved in pod-ranges.json in the state directory: with ``auto``, pods keep their
addresses if the node's address changes. In mode multi-pool, the pools' ranges come from this node's
CiliumNode; its requests and releases are the table ``pod-pool-requests``, from which the CiliumNode is
written.

Settings: ipam, ipv4-range, ipv6-range, ipv6-cluster-alloc-cidr, ipam-default-ip-pool,
ipam-multi-pool-pre-allocation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Network
from typing import Final

import anyio

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.base.metrics import Collector, MetricFamily, counter, features, gauge
from cells.config import AgentConfig
from cells.node.devices import Device
from cells.node.ipam.allocator import Allocator, Clock
from cells.node.ipam.pools import AssignedPodCIDRs, NodePools, OperatorPools, PoolRequest
from cells.node.ipam.ranges import NEXT_FAILED, IpamError, IpamLaterError, PodRange
from cells.node.ipam.settings import (
    IpamSettings,
    PodAddressing,
    SavedRanges,
    automatic_range,
    nested_range,
    pod_addressing,
    save_ranges,
    saved_pools,
    saved_ranges,
)
from lifecycle import (
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    Table,
    UsageError,
    config,
    group,
    minutes,
    module,
    provide,
    provide_private,
)

__all__ = ["Ipam", "cell"]


# The allocator of this node: determines its ranges at start, and releases expired addresses.

DELEGATED: Final = "delegated-plugin"
PENDING_CHECK_INTERVAL: Final = minutes(1)
"""Interval of the check for pending requests of pods that no longer wait."""


class Ipam(Allocator):
    """Allocates addresses of the node's ranges. Synchronous; only for use on the event loop.

    Dependents start after its hook, so they know the ranges.
    """

    mode: str
    """Who decides which addresses are this node's, under Cilium's names."""

    def __init__(
        self,
        addressing: PodAddressing,
        agent: AgentConfig,
        devices: Table[int, Device],
        clock: Clock,
        table: Table[IPNetwork, PodRange],
        pools: OperatorPools,
        assigned: AssignedPodCIDRs | None = None,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        several = addressing.pooled
        super().__init__(addressing.default_pool, clock, several=several)
        self.mode = addressing.mode
        """The IPAM mode, named as in Cilium."""
        self.delegated = addressing.mode == DELEGATED
        self.local_routers = addressing.routers
        """The configured router addresses: local-router-ipv4 and local-router-ipv6."""
        self._addressing = addressing
        self._agent = agent
        self._devices = devices
        self._clock = clock
        self._assigned = assigned
        self._table = table
        self._first = table.initializer("ranges of this node's pods")
        self._log = log
        self._timer_started: anyio.Event | None = None
        self._node_pools: NodePools | None = None
        jobs.one_shot("release expired addresses", self._expire)
        if several:
            child = health.child("pools")
            self._node_pools = NodePools(self, addressing, agent, pools, clock, child, log)
            lifecycle.append(Hook("wait for pools", self._start_pools, start_timeout=math.inf))
            jobs.timer("ask for addresses", self._update_requests, PENDING_CHECK_INTERVAL)
            if pools.assigned is not None:
                jobs.observe("follow pools", pools.assigned.changes, self._follow_pools)
            return
        pools.requests.initializer("this node requests no pools").done()
        if self.delegated:
            lifecycle.append(Hook("leave addresses to the delegated plugin", self._start_delegated))
            return
        lifecycle.append(Hook("find the range of pod addresses", self._start))
        if assigned is not None:
            jobs.observe("follow ranges", assigned.changes, self._follow_assigned)

    def arm_expiration(self, ip: IPAddress, pool: str) -> str:
        """Release the address in 10 minutes; return the uuid that stops it.

        Raises IpamError if a timer runs.
        """
        token = super().arm_expiration(ip, pool)
        if self._timer_started is not None:
            self._timer_started.set()
        return token

    def forget_retired(self) -> None:
        """Drop retired networks without addresses in use. Call it once all claims are made."""
        super().forget_retired()
        if self._node_pools is not None:
            self._node_pools.claimed()

    async def _start_pools(self) -> None:
        for family in Family:
            if family in self._addressing.ranges:
                self._log.warning(f"{family}-range has no effect with ipam=multi-pool")
        if self._node_pools is not None:
            self._ranges_changed()
            self._first.done()
            await self._node_pools.start()

    async def _start_delegated(self) -> None:
        families = [family for family, enabled in self._enabled.items() if enabled]
        for family in families:
            if family not in self.local_routers:
                raise UsageError(
                    f"--local-router-{family} must be provided when {family.text} is enabled with"
                    f" --ipam={self.mode}"
                )
            if family in self._addressing.ranges:
                self._log.warning(f"{family}-range has no effect with ipam={self.mode}")
        self.delegate(families)
        self._first.done()

    @property
    def _enabled(self) -> dict[Family, bool]:
        return {Family.IPV4: self._agent.ipv4, Family.IPV6: self._agent.ipv6}

    async def _update_requests(self) -> None:
        await self._follow_pools(None)

    async def _follow_pools(self, _: object) -> None:
        if self._node_pools is not None:
            self._node_pools.look()

    def _pool_for(self, owner: str, family: Family) -> str:
        return self._node_pools.pool_for(owner, family) if self._node_pools is not None else self._pool

    def _unavailable(self, text: str, pool: str, family: Family, owner: str) -> IpamError:
        if self._node_pools is None:
            return super()._unavailable(text, pool, family, owner)
        if refused := self._node_pools.add_pending(pool, family, owner):
            return IpamError(NEXT_FAILED, f"{text}: {refused}")
        return IpamLaterError(text, self._node_pools.wait_changed)

    def _record(self, ip: IPAddress, owner: str, pool: str) -> None:
        super()._record(ip, owner, pool)
        if self._node_pools is not None:
            self._node_pools.remove_pending(pool, Family.of(ip), owner)

    def _use_changed(self) -> None:
        if self._node_pools is not None:
            self._node_pools.use_changed()

    async def _start(self) -> None:
        enabled = self._enabled
        restored = saved_ranges(self._agent.state_dir, self._log)
        saved = restored.primary
        for family in Family:
            if not enabled[family] and family in self._addressing.ranges:
                self._log.warning(f"{family}-range has no effect without enable-{family}")
        assigned = self._assigned.current() if self._assigned is not None else {}
        found = {
            family: self._addressing.ranges.get(family)
            or next(iter(assigned.get(family, ())), None)
            or saved.get(family)
            for family in Family
        }
        if any(enabled[family] and network is None for family, network in found.items()):
            await self._devices.wait_initialized()
            self._choose_automatic(found)
        missing = [family for family, network in found.items() if enabled[family] and network is None]
        if missing:
            name = missing[0].text
            raise UsageError(
                f"{name} allocation CIDR is not configured. Please specify --{missing[0]}-range: "
                "auto needs a global IPv4 address on one of the node's devices, there is none"
            )
        used = {family: network for family, network in found.items() if enabled[family] and network}
        others = [
            network for family in used for network in assigned.get(family, ()) if self._uses_assigned(family)
        ]
        retired = [
            network for family, network in saved.items() if self._uses_assigned(family) and family in assigned
        ]
        for networks in saved_pools(self._agent.state_dir, self._log).values():  # saved in mode multi-pool
            retired += [network for network in networks if network not in retired]
        primary = list(used.values())
        self.use(*primary, *(each for each in others if each not in primary), retired=retired)
        self._first.done()
        self._save(used, {family for family in used if family in assigned and self._uses_assigned(family)})
        self._log.info(
            "pod address ranges", **{family: str(used[family]) for family in used}, pool=self.default_pool
        )

    def _uses_assigned(self, family: Family) -> bool:
        """Whether the family uses assigned ranges, as none is configured."""
        return family not in self._addressing.ranges

    async def _follow_assigned(self, _: object) -> None:
        """Use the ranges that are assigned now. A deleted object changes nothing."""
        if self._assigned is None:
            return
        for family, networks in self._assigned.current().items():
            if self._uses_assigned(family) and self.follow(family, networks):
                names = [str(network) for network in networks]
                self._log.info("ranges of pods have changed", family=str(family), ranges=names)
                self._save({family: networks[0]}, {family})

    def _save(self, used: Mapping[Family, IPNetwork], assigned: Collection[Family]) -> None:
        """Save these ranges, and keep saved ones of other families and whether they were assigned."""
        saved = saved_ranges(self._agent.state_dir, self._log)
        ranges = {**saved.primary, **used}
        same = {family for family in saved.assigned if saved.primary[family] == ranges[family]}
        now = SavedRanges(ranges, frozenset(assigned) | same)
        if now != saved:
            save_ranges(self._agent.state_dir, now)

    def _ranges_changed(self) -> None:
        with self._table.txn() as txn:
            txn.replace_all(self.pod_ranges())
        if self._node_pools is not None and self._families:
            self._node_pools.save_if_changed()

    def _choose_automatic(self, found: dict[Family, IPNetwork | None]) -> None:
        """Choose missing ranges by the node's addresses, if possible."""
        ipv4 = found[Family.IPV4] = found[Family.IPV4] or automatic_range(self._devices.all())
        if found[Family.IPV6] is None and isinstance(ipv4, IPv4Network):
            found[Family.IPV6] = nested_range(self._addressing.nested, ipv4)

    async def _expire(self) -> None:
        while True:
            pause = self.next_expiration()
            if pause is None:
                self._timer_started = anyio.Event()
                await self._timer_started.wait()
                continue
            await self._clock.sleep(pause)  # timers started meanwhile expire later
            for lost in self.release_expired():
                ip, owner, uuid = str(lost.ip), lost.owner, lost.expiration_uuid
                self._log.warning("Released IP after expiration", ip=ip, owner=owner, uuid=uuid)


# Addresses as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_ipam_capacity, cilium_ipam_events_total, cilium_ip_addresses.


def families(ipam: Allocator) -> Iterator[MetricFamily]:
    """Yield metrics of capacity, events and allocated addresses, for enabled families."""
    usage = ipam.usage()
    events = {
        (action, family.value): counts[family]
        for action, counts in (("allocate", ipam.allocated), ("release", ipam.released))
        for family in usage
    }
    yield gauge(
        "cilium_ipam_capacity",
        "Total number of IPs in the IPAM pool labeled by family",
        {family.value: capacity for family, (_, capacity) in usage.items()},
        "family",
    )
    yield counter(
        "cilium_ipam_events_total",
        "Number of IPAM events received labeled by action and datapath family type",
        events,
        "action family",
    )
    yield gauge(
        "cilium_ip_addresses",
        "Number of allocated IP addresses",
        {family.value: taken for family, (taken, _) in usage.items()},
        "family",
        fixed=True,
    )


def ipam_metrics(ipam: Ipam) -> Member[Collector]:
    """Return the collector of IPAM metrics."""

    async def collect() -> Iterable[MetricFamily]:
        return families(ipam)

    return Collector("ipam", collect)


def ipam_features(ipam: Ipam) -> Member[Collector]:
    """Return the collector of the IPAM mode as a feature."""
    return features("ipam-features", lambda: {"controlplane_ipam": ipam.mode})


def pod_ranges() -> Table[IPNetwork, PodRange]:
    """Return the table ``pod-ranges``, by network; Ipam fills it."""
    return Table("pod-ranges", key=lambda row: row.network)


def pool_requests() -> Table[str, PoolRequest]:
    """Return the table ``pod-pool-requests``, by pool; Ipam fills it."""
    return Table("pod-pool-requests", key=lambda row: row.pool)


cell = group(
    module(
        "ipam-settings",
        "IPAM settings",
        config(IpamSettings),
        provide(pod_addressing),
    ),
    module(
        "ipam",
        "Pod addresses",
        provide(Ipam, pod_ranges, pool_requests, ipam_metrics, ipam_features),
        provide_private(Clock, OperatorPools),
    ),
)
