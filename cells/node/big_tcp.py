"""BIG TCP: packets of up to 192 KiB on pods' links and uplinks, for fewer traversals of the stack.

Controller: the table ``devices`` in; GSO and GRO limits of uplinks, and those of new pods' links, out.

Why: running pods keep their limits, because a socket reads them when it connects.

Source: Cilium 1.17, options, sizes and incompatible settings; Linux 5.19 (IPv6), 6.3 (IPv4). Only TCP uses
such packets; their length fields are zero.
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
"""Bytes; three times the limit without BIG TCP."""
LOOPBACK: Final = 1
"""Index of lo: a kernel that supports a limit reports it for every device."""
_KERNELS: Final = {Family.IPV4: "6.3", Family.IPV6: "5.19"}
_NAMES: Final = ("", "ipv4-only", "ipv6-only", "ipv4-ipv6-dual-stack")


class BigTcpSettings(Settings, frozen=True):
    """Settings of BIG TCP."""

    enable_ipv4_big_tcp: bool = False
    """Enable BIG TCP for IPv4: packets of up to 192 KiB, if the node's devices support them, in new pods.
    Needs routing-mode=native and host routing by eBPF, and no encryption.
    """

    enable_ipv6_big_tcp: bool = False
    """Enable BIG TCP for IPv6, with the same requirements."""


class BigTcpRequirements:
    """The configured families, and the settings that BIG TCP requires."""

    def __init__(self, settings: BigTcpSettings, routing: HostRouting, view: HiveView) -> None:
        self._settings = settings
        self._routing = routing
        self._view = view

    def families(self) -> frozenset[Family]:
        """Return the configured families. Raises UsageError with an incompatible setting."""
        requested = {
            Family.IPV4: self._settings.enable_ipv4_big_tcp,
            Family.IPV6: self._settings.enable_ipv6_big_tcp,
        }
        wanted = frozenset(family for family, on in requested.items() if on)
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
    """Sets the limits of uplinks at start and of later uplinks. Without BIG TCP they are reset to 64 KiB."""

    enabled: frozenset[Family]
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
        self.enabled = frozenset()
        """The enabled families, after the start hook."""
        self.limits = OffloadLimits()
        """The limits of both ends of pods' links."""
        self._requirements = requirements
        self._devices = devices
        self._links = links
        self._log = log
        self._configured: set[int] = set()
        """Indexes of uplinks that have their limits, or do not support them."""
        lifecycle.append(Hook("set up BIG TCP", self._start))
        jobs.observe("watch devices", devices.changes, self._follow_devices)

    async def _start(self) -> None:
        """Set the limits. If the kernel or a device does not support BIG TCP, log that and disable it.

        Raises UsageError.
        """
        wanted = self._requirements.families()
        uplinks = native_uplinks(self._devices.all())
        supported = self._supported()
        for family in sorted(wanted - supported):
            self._log.warning(
                f"enable-{family.value}-big-tcp=true: disabled: it requires Linux {_KERNELS[family]} or newer"
            )
        if wanted and not uplinks:
            self._log.warning("BIG TCP disabled: the node has no uplink")
        elif wanted & supported:
            self._enable(wanted & supported, uplinks)
        if (error := self._set_limits(uplinks)) and self.enabled:
            self._log.warning("BIG TCP disabled: a device does not support it", error=error)
            self.enabled, self.limits = frozenset(), OffloadLimits()
            error = self._set_limits(uplinks)
        if error:
            self._log.warning("GSO and GRO limits of devices not set to 64 KiB", error=error)

    def _supported(self) -> frozenset[Family]:
        known = self._links.offloads(LOOPBACK)
        shown = {Family.IPV4: known.limits.gso_ipv4, Family.IPV6: known.largest}
        return frozenset(family for family, size in shown.items() if size)

    def _enable(self, families: frozenset[Family], uplinks: Iterable[Device]) -> None:
        """Choose the largest size that every uplink supports, without uplinks limited to 64 KiB."""
        largest = LARGEST
        for device in uplinks:
            found = self._offloads(device)
            size = found.largest if found is not None else 0
            if USUAL_PACKET < size < largest:
                self._log.info("device supports only smaller packets", device=device.name, bytes=size)
                largest = size
        six = largest if Family.IPV6 in families else USUAL_PACKET
        four = largest if Family.IPV4 in families else USUAL_PACKET
        self.enabled, self.limits = families, OffloadLimits(gro=six, gso=six, gro_ipv4=four, gso_ipv4=four)

    def _offloads(self, device: Device) -> Offloads | None:
        """Return the device's limits; None if it has been removed."""
        try:
            return self._links.offloads(device.ifindex)
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def _set_limits(self, uplinks: Iterable[Device]) -> str:
        """Set the limits of uplinks; return the error of the last uplink that failed, or ""."""
        failure = ""
        for device in uplinks:
            self._configured.add(device.ifindex)
            try:
                if (now := self._offloads(device)) is None:
                    continue
                wanted = self.limits if self.enabled else now.limits.reduced(USUAL_PACKET)
                if now.limits == wanted:
                    continue
                self._links.set_offloads(device.ifindex, wanted)
            except NetlinkError as error:
                failure = f"{device.name}: {error}"
                continue
            sizes = {"ipv6": wanted.gso, "ipv4": wanted.gso_ipv4}
            self._log.info("largest packets of GSO and GRO set", device=device.name, **sizes)
        return failure

    async def _follow_devices(self, _: list[Change[int, Device]]) -> None:
        """Set the limits of new uplinks."""
        uplinks = native_uplinks(self._devices.all())
        self._configured &= {device.ifindex for device in self._devices.all()}
        later = [device for device in uplinks if device.ifindex not in self._configured]
        if self.enabled and (error := self._set_limits(later)):
            self._log.warning("device does not support BIG TCP", error=error)


def big_tcp_features(big_tcp: BigTcp) -> Member[Collector]:
    """Return the collector of the families with BIG TCP."""

    def enabled_families() -> str:
        return _NAMES[sum(1 << place for place, family in enumerate(Family) if family in big_tcp.enabled)]

    return features("big-tcp-features", lambda: {"adv_connect_and_lb_big_tcp_enabled": enabled_families()})


cell = module(
    "big-tcp",
    "BIG TCP",
    config(BigTcpSettings),
    provide(BigTcp, big_tcp_features),
    provide_private(BigTcpRequirements),
)
