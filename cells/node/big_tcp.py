"""BIG TCP: packets of up to 192 KiB between pods and the node's devices, for fewer passes through the stack.

Controller: the table ``devices`` in; the GSO and GRO limits of uplinks out, and those that pods' links get.
Source:     Cilium 1.17, option names, sizes and what BIG TCP cannot be used with; Linux 5.19 (IPv6), 6.3
            (IPv4). TCP alone makes such packets, and they have no length in their headers.
Why:        pods that run keep the limits they were made with: a socket has read them when it was connected.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from typing import Final

from cells.base.addresses import Family
from cells.base.metrics import Collector, features
from cells.datapath.settings import HostRouting
from cells.netlink.connection import NetlinkError
from cells.netlink.links import HostLinks
from cells.netlink.messages import USUAL_PACKET, OffloadLimits
from cells.netlink.rows import Offloads
from cells.node.devices import Device, native_uplinks
from lifecycle import (
    Change,
    HiveView,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    Settings,
    Table,
    UsageError,
    config,
    module,
    provide,
    provide_private,
)

__all__ = ["BigTcp", "cell"]

LARGEST: Final = 196608
"""Bytes: three times as much as without."""
LOOPBACK: Final = 1
"""Index of lo: a kernel that knows a limit shows it of every device."""
_KERNELS: Final = {Family.IPV4: "6.3", Family.IPV6: "5.19"}
_NAMES: Final = ("", "ipv4-only", "ipv6-only", "ipv4-ipv6-dual-stack")


class BigTcpSettings(Settings, frozen=True):
    """Packets of more than 64 KiB."""

    enable_ipv4_big_tcp: bool = False
    """Let TCP over IPv4 make packets of up to 192 KiB, as far as the node's devices take them, in pods that
    are created from then on. Needs routing-mode=native and host routing by eBPF, and no encryption."""

    enable_ipv6_big_tcp: bool = False
    """The same for TCP over IPv6."""


class BigTcpRequirements:
    """What is asked for, and what that asks of other settings."""

    def __init__(self, settings: BigTcpSettings, routing: HostRouting, view: HiveView) -> None:
        self._settings = settings
        self._routing = routing
        self._view = view

    def families(self) -> frozenset[Family]:
        """Those that are to have it. Raises UsageError, one line, beside what it cannot be used with."""
        asked = {
            Family.IPV4: self._settings.enable_ipv4_big_tcp,
            Family.IPV6: self._settings.enable_ipv6_big_tcp,
        }
        wanted = frozenset(family for family, on in asked.items() if on)
        values = {one.option.name: one.value for one in self._view.loaded.settings}
        for family in sorted(wanted):
            if why := self._conflict(values):
                raise UsageError(f"enable-{family.value}-big-tcp=true: BIG TCP is not supported {why}")
        return wanted

    def _conflict(self, values: Mapping[str, object]) -> str:
        if values.get("routing-mode") == "tunnel":
            return "in tunneling mode; set routing-mode=native"
        for option in ("enable-wireguard", "enable-ipsec"):
            if values.get(option) is True:
                return f"with encryption enabled; set {option}=false"
        if not self._routing.past_stack:
            needed = "kube-proxy-replacement=true, and leave enable-host-legacy-routing unset"
            return f"with legacy host routing; set {needed}"
        return ""


class BigTcp:
    """Sets uplinks' limits at the start, where BIG TCP is off back to 64 KiB, and those of later uplinks."""

    on: frozenset[Family]
    """The families that have it, once the hook has run."""
    limits: OffloadLimits
    """Of pods' links, on both ends."""

    def __init__(
        self,
        requirements: BigTcpRequirements,
        devices: Table[int, Device],
        links: HostLinks,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.on = frozenset()
        self.limits = OffloadLimits()
        self._requirements = requirements
        self._devices = devices
        self._links = links
        self._log = log
        self._done: set[int] = set()
        """Uplinks that have their limits, or do not take them, by index."""
        lifecycle.append(Hook("set up BIG TCP", self._start))
        jobs.observe("watch devices", devices.changes, self._follow)

    async def _start(self) -> None:
        """Raises UsageError; what the kernel or a device cannot do is logged, and BIG TCP is off then."""
        wanted = self._requirements.families()
        uplinks = native_uplinks(self._devices.all())
        supported = self._supported()
        for family in sorted(wanted - supported):
            self._log.warning(
                f"enable-{family.value}-big-tcp=true: needs Linux {_KERNELS[family]} or newer: it is off"
            )
        if wanted and not uplinks:
            self._log.warning("BIG TCP is off: no device is found through which packets leave the node")
        elif wanted & supported:
            self._switch_on(wanted & supported, uplinks)
        if (error := self._set(uplinks)) and self.on:
            self._log.warning("BIG TCP is off: a device does not take its packets", error=error)
            self.on, self.limits = frozenset(), OffloadLimits()
            error = self._set(uplinks)
        if error:
            self._log.warning("GSO and GRO limits of devices not set to 64 KiB", error=error)

    def _supported(self) -> frozenset[Family]:
        known = self._links.offloads(LOOPBACK)
        shown = {Family.IPV4: known.limits.gso_ipv4, Family.IPV6: known.largest}
        return frozenset(family for family, size in shown.items() if size)

    def _switch_on(self, families: frozenset[Family], uplinks: Iterable[Device]) -> None:
        """With packets that every uplink takes which takes larger ones at all."""
        largest = LARGEST
        for device in uplinks:
            found = self._offloads(device)
            size = found.largest if found is not None else 0
            if USUAL_PACKET < size < largest:
                self._log.info("device takes smaller packets", device=device.name, bytes=size)
                largest = size
        six = largest if Family.IPV6 in families else USUAL_PACKET
        four = largest if Family.IPV4 in families else USUAL_PACKET
        self.on, self.limits = families, OffloadLimits(gro=six, gso=six, gro_ipv4=four, gso_ipv4=four)

    def _offloads(self, device: Device) -> Offloads | None:
        """None of one that is removed meanwhile."""
        try:
            return self._links.offloads(device.ifindex)
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def _set(self, uplinks: Iterable[Device]) -> str:
        """Give uplinks their limits; the error of the last that does not take them, or empty."""
        refused = ""
        for device in uplinks:
            self._done.add(device.ifindex)
            try:
                if (now := self._offloads(device)) is None:
                    continue
                wanted = self.limits if self.on else now.limits.reduced(USUAL_PACKET)
                if now.limits == wanted:
                    continue
                self._links.set_offloads(device.ifindex, wanted)
            except NetlinkError as error:
                refused = f"{device.name}: {error}"
                continue
            sizes = {"ipv6": wanted.gso, "ipv4": wanted.gso_ipv4}
            self._log.info("largest packets of GSO and GRO set", device=device.name, **sizes)
        return refused

    async def _follow(self, _: list[Change[int, Device]]) -> None:
        """Uplinks that have come since the start."""
        uplinks = native_uplinks(self._devices.all())
        self._done &= {device.ifindex for device in self._devices.all()}
        later = [device for device in uplinks if device.ifindex not in self._done]
        if self.on and (error := self._set(later)):
            self._log.warning("device does not take packets of BIG TCP", error=error)


def big_tcp_features(big_tcp: BigTcp) -> Member[Collector]:
    """The families with BIG TCP as a feature in use."""

    def which() -> str:
        return _NAMES[sum(1 << place for place, family in enumerate(Family) if family in big_tcp.on)]

    return features("big-tcp-features", lambda: {"adv_connect_and_lb_big_tcp_enabled": which()})


cell = module(
    "big-tcp",
    "Packets of more than 64 KiB",
    config(BigTcpSettings),
    provide(BigTcp, big_tcp_features),
    provide_private(BigTcpRequirements),
)
