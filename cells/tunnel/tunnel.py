"""The tunnel of this node: its device, the programs on it, and what those of pods know of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Final

from cells.base.addresses import Family
from cells.cluster.direct_routes import DirectRouteSettings
from cells.cluster.identity.identities import ClusterAllocator, NodeAllocator
from cells.datapath.datapath import TUNNEL_LINK, Datapath
from cells.netlink import news
from cells.node.addresses import NodeAddress
from cells.node.devices import Device, PodMtu, addressed
from cells.node.ipam.settings import PodAddressing
from cells.node.sysctl import Sysctls
from cells.tunnel.kernel import TunnelKernel, TunnelLinks, TunnelMaps, TunnelObject, wanted
from cells.tunnel.settings import RouteMtu, TunnelSettings
from lifecycle import (
    Derived,
    Health,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Reconciler,
    Table,
    Tables,
    UsageError,
    seconds,
)
from lifecycle.tables import ReconcileError

__all__ = ["Tunnel"]


INTERVAL: Final = seconds(30)

_RTMGRP_TC: Final = 0x8
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
FILTERS_REMOVED: Final = news.passing((news.kinds(_RTM_DELQDISC, _RTM_DELTFILTER),))

OTHER: Final = {Family.IPV4: Family.IPV6, Family.IPV6: Family.IPV4}

NO_ADDRESS_FOR_GATEWAYS: Final = (
    "enable-ipv4-egress-gateway=true: this node has no IPv4 address, by which tunnels lead to gateways:"
    " give it one, or set it to false"
)


def no_address(underlay: Family) -> str:
    """What to do on a node without an address that other nodes could send the tunnel's packets to."""
    return (
        f"underlay-protocol={underlay}: this node has no {underlay.text} address; pods of other nodes are out"
        f" of reach: give it one, or set underlay-protocol={OTHER[underlay]} or routing-mode=native"
    )


SYSCTLS: Final = {f"net/ipv4/conf/{TUNNEL_LINK}/rp_filter": "0"}
"""What comes out has no route back over the device."""


def _refuse_in_tunnel(ipam: PodAddressing) -> None:
    """Raise UsageError for what pods' addresses need a network without tunnels for."""
    if ipam.pooled:
        raise UsageError(
            "routing-mode=tunnel: Cannot specify IPAM mode multi-pool in tunnel mode;"
            " set routing-mode=native, or another ipam"
        )
    for family in Family:
        if family in ipam.routers:
            raise UsageError(
                f"routing-mode=tunnel: Cannot specify local-router-{family} in tunnel mode;"
                " set routing-mode=native"
            )


class Tunnel:
    """Made by its hook, before pods are attached; it stays at stop. In native mode the hook removes it.

    While the agent runs, what is removed or changed is made right again: at once where the kernel reports it,
    else within half a minute.
    """

    def __init__(
        self,
        settings: TunnelSettings,
        datapath: Datapath,
        links: TunnelLinks,
        maps: TunnelMaps,
        devices: Table[int, Device],
        addresses: Table[Family, NodeAddress],
        *,
        mtu: PodMtu,
        route_mtu: RouteMtu,
        sysctls: Sysctls,
        direct: DirectRouteSettings | None,
        ipam: PodAddressing | None,
        allocator: ClusterAllocator | None,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self.settings = settings
        self._no_address = no_address(settings.underlay) if settings.tunnelled else NO_ADDRESS_FOR_GATEWAYS
        self._health = health.child("underlay")
        self._direct = direct is not None and direct.auto_direct_node_routes
        self._ipam = ipam
        self._own_identities = allocator is None or isinstance(allocator, NodeAllocator)
        self._devices = devices
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._log = log
        self._kernel = TunnelKernel(links, datapath, maps, log, write_settings=lambda: sysctls.keep(SYSCTLS))
        self._objects: Derived[str, TunnelObject] = Derived("tunnel", self._wanted, devices, addresses)
        self._reconciler = Reconciler(
            self._objects, self._kernel, full_every=INTERVAL if settings.has_tunnel else math.inf
        )
        tables.add(self._objects, self._reconciler.statuses)
        lifecycle.append(Hook("set up the tunnel", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", devices.changes, self._look)
        if settings.has_tunnel:
            jobs.observe("watch filters", self._hints, self._look)

    def _wanted(self, devices: list[Device], addresses: list[NodeAddress]) -> Mapping[str, TunnelObject]:
        own = next((row.ip for row in addresses if row.family is self.settings.underlay), None)
        held = [each.ip for device in devices for each in device.addresses]
        return wanted(
            self.settings,
            self._mtu(),
            self._route_mtu(),
            own,
            held,
            own_identities=self._own_identities,
        )

    async def _start(self) -> None:
        if self.settings.tunnelled and self._direct:
            raise UsageError(
                "auto-direct-node-routes=true: packets to other nodes go through the tunnel;"
                " set it to false, or routing-mode=native"
            )
        if self.settings.has_tunnel and self.settings.underlay is Family.IPV6 and self._route_mtu.encryption:
            raise UsageError(
                "underlay-protocol=ipv6: what the tunnel carries over IPv6 is not encrypted yet;"
                " set it to ipv4, or enable-wireguard=false and enable-ipsec=false"
            )
        if self.settings.tunnelled and self._ipam is not None:
            _refuse_in_tunnel(self._ipam)
        if self.settings.has_tunnel and not self._has_address():
            self._log.warning(self._no_address)
        try:
            await self._reconciler.sweep()
        except ReconcileError as error:
            needed = [why for key, why in error.failures.items() if key in self._objects]
            if needed:
                raise HiveError(f"failed to set up the tunnel: {needed[0]}") from needed[0]
            self._log.warning("failed to remove the tunnel", device=TUNNEL_LINK, error=str(error))

    def _has_address(self) -> bool:
        return any(
            Family.of(address.ip) is self.settings.underlay
            and not (address.ip.is_loopback or address.ip.is_link_local)
            for device in addressed(self._devices.all())
            for address in device.addresses
        )

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in news.hints(_RTMGRP_TC, FILTERS_REMOVED):
            yield hint

    async def _look(self, _: object) -> None:
        self._reconciler.trigger()
        if self.settings.has_tunnel and not self._has_address():
            self._health.degraded(self._no_address)
        elif self.settings.has_tunnel:
            self._health.ok(f"this node has an {self.settings.underlay.text} address")
