"""The tunnel of this node: its device, the programs on it, and its row in hive_tunnel."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Final

from cells.base.addresses import Family
from cells.cluster.direct_routes import DirectRouting
from cells.cluster.identity.identities import ClusterAllocator, NodeAllocator
from cells.netlink.connection import message_filter, notifications, of_types
from cells.node.addresses import NodeAddress
from cells.node.devices import Device, PodMtu, addressed
from cells.node.ipam.settings import PodAddressing
from cells.tunnel.kernel import TunnelKernel, TunnelObject, wanted
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

__all__ = ["Tunnel", "TunnelRequirements", "WantedTunnel"]


INTERVAL: Final = seconds(30)

_RTMGRP_TC: Final = 0x8
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
FILTERS_REMOVED: Final = message_filter((of_types(_RTM_DELQDISC, _RTM_DELTFILTER),))

_OTHER_FAMILY: Final = {Family.IPV4: Family.IPV6, Family.IPV6: Family.IPV4}

NO_ADDRESS_FOR_GATEWAYS: Final = (
    "enable-ipv4-egress-gateway=true: this node has no IPv4 address, which tunnels to gateways need:"
    " add one, or set it to false"
)


def no_address(underlay: Family) -> str:
    """Return the message for a node without an address of the underlay's family."""
    return (
        f"underlay-protocol={underlay}: this node has no {underlay.text} address; pods of other nodes cannot"
        f" be reached: add one, or set underlay-protocol={_OTHER_FAMILY[underlay]} or routing-mode=native"
    )


def _refuse_in_tunnel(ipam: PodAddressing) -> None:
    """Raise UsageError for IPAM settings that require native routing."""
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


class TunnelRequirements:
    """Checks other settings and the node's addresses that the tunnel depends on."""

    def __init__(
        self,
        settings: TunnelSettings,
        devices: Table[int, Device],
        route_mtu: RouteMtu,
        direct: DirectRouting | None,
        ipam: PodAddressing | None,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._route_mtu = route_mtu
        self._direct = direct
        self._ipam = ipam

    def check(self) -> None:
        """Raise UsageError, one line, for settings that conflict with the tunnel."""
        settings = self._settings
        if settings.tunnelled and self._direct is not None and self._direct.used:
            raise UsageError(
                "auto-direct-node-routes=true: packets to other nodes go through the tunnel;"
                " set it to false, or routing-mode=native"
            )
        if settings.has_tunnel and settings.underlay is Family.IPV6 and self._route_mtu.encryption:
            raise UsageError(
                "underlay-protocol=ipv6: what the tunnel carries over IPv6 is not encrypted yet;"
                " set it to ipv4, or enable-wireguard=false and enable-ipsec=false"
            )
        if settings.tunnelled and self._ipam is not None:
            _refuse_in_tunnel(self._ipam)

    def missing_address(self) -> str:
        """Return what to do about a missing underlay address; empty if there is one."""
        if not self._settings.has_tunnel or self._has_address():
            return ""
        return no_address(self._settings.underlay) if self._settings.tunnelled else NO_ADDRESS_FOR_GATEWAYS

    def _has_address(self) -> bool:
        return any(
            Family.of(address.ip) is self._settings.underlay
            and not (address.ip.is_loopback or address.ip.is_link_local)
            for device in addressed(self._devices.all())
            for address in device.addresses
        )


class WantedTunnel:
    """The wanted objects of the tunnel, computed from settings, devices and addresses."""

    def __init__(
        self,
        settings: TunnelSettings,
        devices: Table[int, Device],
        addresses: Table[Family, NodeAddress],
        mtu: PodMtu,
        route_mtu: RouteMtu,
        allocator: ClusterAllocator | None,
    ) -> None:
        self._settings = settings
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._own_identities = allocator is None or isinstance(allocator, NodeAllocator)
        self.table: Derived[str, TunnelObject] = Derived("tunnel", self._wanted, devices, addresses)
        """The table ``tunnel``."""

    def _wanted(self, devices: list[Device], addresses: list[NodeAddress]) -> Mapping[str, TunnelObject]:
        own = next((row.ip for row in addresses if row.family is self._settings.underlay), None)
        held = [each.ip for device in devices for each in device.addresses]
        return wanted(
            self._settings,
            self._mtu(),
            self._route_mtu(),
            own,
            held,
            own_identities=self._own_identities,
        )


class Tunnel:
    """Creates the tunnel in its start hook, before pods are attached; removes it in native mode.

    It stays at stop. While the agent runs, changes by other programs are repaired: at once if the kernel
    reports them, else within 30 seconds.
    """

    def __init__(
        self,
        settings: TunnelSettings,
        kernel: TunnelKernel,
        wanted: WantedTunnel,
        requirements: TunnelRequirements,
        devices: Table[int, Device],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self.settings = settings
        self._health = health.child("underlay")
        self._requirements = requirements
        self._log = log
        self._objects = wanted.table
        self._reconciler = Reconciler(
            self._objects, kernel, full_every=INTERVAL if settings.has_tunnel else math.inf
        )
        tables.add(self._objects, self._reconciler.statuses)
        lifecycle.append(Hook("set up the tunnel", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", devices.changes, self._check_node)
        if settings.has_tunnel:
            jobs.observe("watch filters", self._hints, self._check_node)

    async def _start(self) -> None:
        self._requirements.check()
        if missing := self._requirements.missing_address():
            self._log.warning(missing)
        try:
            await self._reconciler.sweep()
        except ReconcileError as error:
            needed = [why for key, why in error.failures.items() if key in self._objects]
            if needed:
                raise HiveError(f"failed to set up the tunnel: {needed[0]}") from needed[0]
            self._log.warning("failed to remove the tunnel", error=str(error))

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_TC, FILTERS_REMOVED):
            yield hint

    async def _check_node(self, _: object) -> None:
        self._reconciler.trigger()
        if missing := self._requirements.missing_address():
            self._health.degraded(missing)
        elif self.settings.has_tunnel:
            self._health.ok(f"this node has an {self.settings.underlay.text} address")
