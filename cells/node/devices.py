"""The table ``devices``: the node's network devices and their addresses, without pods' links.

Source: rtnetlink notifications; fills Table[int, Device] (key: ifindex). Links named lxc* and tmp* are left
out.

Why: the pod range, the MTU and the host addresses in BPF maps depend on the devices and change with them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import anyio
import msgspec
from msgspec.structs import replace

from cells.config import AgentConfig
from cells.netlink.connection import DROP, EQUAL, LOAD_HALF, LOAD_WORD, MASK, PASS, RETURN, TYPE, subscribed
from cells.netlink.links import HostLinks
from cells.netlink.messages import IPAddress, IPInterface
from lifecycle import (
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Settings,
    Table,
    config,
    module,
    provide,
    provide_private,
)
from lifecycle.tables import Initializer

__all__ = [
    "OURS",
    "Device",
    "DeviceSettings",
    "PodMtu",
    "addressed",
    "cell",
    "matches",
    "native_uplinks",
    "uplinks",
]


# Settings.

ANY: Final = "+"
"""Suffix of a name that matches every name with the prefix, as in iptables."""
_NAME: Final = re.compile(r"[^\s/:+]{1,15}|[^\s/:+]{0,14}\+")
_MAX_SHOWN: Final = 32
"""Maximum number of characters of an invalid name in an error."""


class DeviceSettings(Settings, frozen=True):
    """Selection of the node's uplinks."""

    devices: tuple[str, ...] = ()
    """Uplinks of the node; eth+ matches all names that start with eth. They determine the node's address and
    the pods' MTU. Unset: every device that is up and has an address.
    """

    def faults(self) -> Iterator[str]:
        """Yield an error for names that no device can have (kernel: dev_valid_name in net/core/dev.c)."""
        wrong = [name for name in self.devices if not _NAME.fullmatch(name)]
        if wrong:
            shown = wrong[0] if len(wrong[0]) <= _MAX_SHOWN else f"{wrong[0][:_MAX_SHOWN]}..."
            yield (
                f"devices={','.join(self.devices)}: {shown} is not a valid device name; expected names such"
                " as eth0, or eth+"
            )


def matches(wanted: str, name: str) -> bool:
    """Whether a device's name is ``wanted``, or starts with the prefix before its ``+``."""
    return name.startswith(wanted.removesuffix(ANY)) if wanted.endswith(ANY) else name == wanted


# Devices, uplinks, and the pods' MTU.

OTHER_PLUGIN_PREFIXES = ("docker", "cni", "podman", "virbr")
"""Name prefixes of other plugins' bridges, which are native only if ``devices`` names them."""
EXCLUDED_KINDS = frozenset({"vxlan", "geneve", "dummy", "ipip", "ip6tnl", "sit", "gre", "wireguard"})
"""Tunnels of other networks, and virtual devices; native only if ``devices`` names them."""
MAC_LENGTH = 6
L3_ADDRESS_LENGTHS = (0, 4, 16)
"""Lengths of link-layer addresses without Ethernet headers: none, or a tunnel's (linux/if_arp.h)."""
OURS = "cilium_"
"""Name prefix of the agent's own devices."""
LOOPBACK = "lo"
DEFAULT_MTU = 1500


class Device(msgspec.Struct, frozen=True):
    """A link of the node, except pods' links, with its addresses: IPv4, then IPv6.

    The addresses of a family are in the kernel's order (primary first). Link-local IPv6 addresses are left
    out: every link has one, and nothing depends on it. ``kind`` is rtnetlink's IFLA_INFO_KIND ("veth",
    "vxlan"), "" for hardware and lo.
    """

    ifindex: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    up: bool
    addresses: tuple[IPInterface, ...]
    selected: bool = True
    """Whether the setting ``devices`` permits it as an uplink."""
    named: bool = False
    """Whether that setting names it: then it gets programs, regardless of its name prefix and kind."""

    @property
    def has_ethernet(self) -> bool:
        """Whether packets have an Ethernet header; those of L3 devices (tun, wireguard) have none."""
        return len(self.mac) == MAC_LENGTH


def uplinks(devices: Iterable[Device]) -> list[Device]:
    """Return the devices through which packets leave the node: addressed() and selected, except lo."""
    return [device for device in addressed(devices) if device.selected and device.name != LOOPBACK]


def native_uplinks(devices: Iterable[Device]) -> list[Device]:
    """Return the uplinks() to which programs are attached, by index."""
    return [each for each in uplinks(devices) if _is_native(each)]


def _is_native(device: Device) -> bool:
    """Whether programs can be attached to the device, and it leads outside."""
    if not device.has_ethernet and len(device.mac) not in L3_ADDRESS_LENGTHS:
        return False  # unknown packet format
    return device.named or not (
        device.name.startswith(OTHER_PLUGIN_PREFIXES) or device.kind in EXCLUDED_KINDS
    )


def addressed(devices: Iterable[Device]) -> list[Device]:
    """Return the devices that connect the node to a network, by index: up, not ours, with an address."""
    return sorted(
        (
            device
            for device in devices
            if device.up
            and not device.name.startswith(OURS)
            and any(not address.ip.is_loopback for address in device.addresses)
        ),
        key=lambda device: device.ifindex,
    )


class PodMtu:
    """Returns, when called, the MTU of pods' links in bytes.

    It is the configured MTU, else the smallest one of the uplinks, else 1500.
    """

    def __init__(self, agent: AgentConfig, devices: Table[int, Device]) -> None:
        self._configured = agent.mtu
        self.devices = devices
        """The table that the MTU depends on."""
        self._cached = (-1, DEFAULT_MTU)
        """The revision of the table, and the MTU computed from it."""

    def __call__(self) -> int:
        if self._configured:
            return self._configured
        revision = self.devices.revision
        if self._cached[0] != revision:
            self._cached = (
                revision,
                min((one.mtu for one in uplinks(self.devices.all())), default=DEFAULT_MTU),
            )
        return self._cached[1]


# Synchronisation of the table with the kernel.
#
# Notifications are hints that something has changed. After a burst of them, all devices are listed again.

SETTLE = 0.05
"""Seconds in which notifications after the first one are combined."""


class Kernel(Protocol):
    """Lists the node's devices and watches for changes."""

    def devices(self) -> list[Device]:
        """Return all devices."""
        ...

    def subscribed(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Subscribe to changes; the callable waits for a change since its last call.

        It raises if notifications may have been lost; then subscribe again.
        """
        ...


class DeviceSource:
    """Fills the table: once at start, then after every change."""

    def __init__(
        self,
        table: Table[int, Device],
        kernel: Kernel,
        settings: DeviceSettings | None = None,
        settle: float = SETTLE,
    ) -> None:
        self._table = table
        self._kernel = kernel
        self._settings = settings or DeviceSettings()
        self._settle = settle
        self._first: Initializer = table.initializer("first list of devices")

    async def start(self) -> None:
        """Fill the table for the first time."""
        self.refresh()
        self._first.done()

    async def hints(self) -> AsyncIterator[None]:
        """Yield once after subscribing (earlier changes were missed), then once per burst of changes."""
        async with self._kernel.subscribed() as changed:
            yield
            while True:
                await changed()
                with anyio.move_on_after(self._settle):
                    while True:
                        await changed()
                yield

    def refresh(self) -> None:
        """Update the table to the kernel's devices."""
        found = {device.ifindex: self._selected(device) for device in self._kernel.devices()}
        with self._table.txn() as txn:
            for known in self._table.all():
                if known.ifindex not in found:
                    txn.delete(known.ifindex)
            for device in found.values():
                txn.put(device)

    def missing(self) -> list[str]:
        """Return names in the setting ``devices`` that match no device."""
        names = [device.name for device in self._table.all()]
        return [
            wanted for wanted in self._settings.devices if not any(matches(wanted, name) for name in names)
        ]

    def _selected(self, device: Device) -> Device:
        names = self._settings.devices
        named = any(matches(wanted, device.name) for wanted in names)
        return replace(device, selected=named or not names, named=named)


def device_table(
    kernel: Kernel, settings: DeviceSettings, lifecycle: Lifecycle, jobs: Jobs, health: Health, log: Logger
) -> Table[int, Device]:
    """Return the table, by ifindex. Its dependents start after the first list."""
    table: Table[int, Device] = Table("devices", key=lambda device: device.ifindex)
    source = DeviceSource(table, kernel, settings)
    selection = health.child("selection")

    def report() -> str:
        """Report the selection to health; return the error, or ""."""
        if missing := source.missing():
            wrong = f"devices names {', '.join(missing)}: the node has no such device"
            selection.degraded(wrong)
            return wrong
        selection.ok(f"uplinks: {', '.join(one.name for one in uplinks(table.all())) or 'none'}")
        return ""

    async def start() -> None:
        await source.start()
        if wrong := report():
            log.warning(wrong)

    async def refresh(_: None) -> None:
        source.refresh()
        report()

    lifecycle.append(Hook("list devices", start))
    jobs.observe("watch", source.hints, refresh)
    return table


# rtnetlink.
#
# Every pod causes a few link notifications, and one of its link-local IPv6 address. A socket filter drops
# them in the kernel.

POD_PREFIXES = ("lxc", "tmp")
"""Name prefixes of pods' links: ``lxc``, and ``tmp`` until Cilium's plugin has moved the peer into the pod.
"""

_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_RTM_NEWADDR, _RTM_DELADDR = 20, 21
_LINK_LOCAL = (
    0x0A0000FD  # first word of an ifaddrmsg without prefix length and flags: AF_INET6, RT_SCOPE_LINK
)
_IFLA_IFNAME = 3

# Offsets in a message: nlmsghdr 16, then ifaddrmsg 8, or ifinfomsg 16 and an attribute's header 4.
_ADDRESS, _FIRST_ATTRIBUTE, _LINK_NAME = 16, 34, 36

FILTER = (
    (LOAD_HALF, 0, 0, TYPE),
    (EQUAL, 9, 0, socket.htons(_RTM_NEWADDR)),
    (EQUAL, 8, 0, socket.htons(_RTM_DELADDR)),
    (EQUAL, 1, 0, socket.htons(_RTM_NEWLINK)),
    (EQUAL, 0, 9, socket.htons(_RTM_DELLINK)),
    (LOAD_HALF, 0, 0, _FIRST_ATTRIBUTE),
    (EQUAL, 0, 7, socket.htons(_IFLA_IFNAME)),
    (LOAD_WORD, 0, 0, _LINK_NAME),
    (MASK, 0, 0, 0xFFFFFF00),
    (EQUAL, 5, 0, int.from_bytes(b"lxc\0", "big")),
    (EQUAL, 4, 3, int.from_bytes(b"tmp\0", "big")),
    (LOAD_WORD, 0, 0, _ADDRESS),
    (MASK, 0, 0, 0xFF0000FF),
    (EQUAL, 1, 0, _LINK_LOCAL),
    (RETURN, 0, 0, PASS),
    (RETURN, 0, 0, DROP),
)
"""A socket filter that drops notifications of pods' links, and of link-local IPv6 addresses."""


class NetlinkKernel:
    """The node's devices by rtnetlink. Notifications are only counted, not parsed."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def devices(self) -> list[Device]:
        """Return every link except pods'; takes 1 ms for a hundred links."""
        addresses = self._links.addresses()
        return [
            Device(
                link.ifindex,
                link.name,
                link.kind,
                link.mac,
                link.mtu,
                link.up,
                tuple(address for address in addresses.get(link.ifindex, ()) if not link_local6(address.ip)),
            )
            for link in self._links.links(without=POD_PREFIXES)
        ]

    def subscribed(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Subscribe to links and addresses. Raises from the wait if the socket overran (ENOBUFS)."""
        return subscribed(_RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR, FILTER)


def link_local6(address: IPAddress) -> bool:
    """Whether it is an IPv6 link-local address."""
    return address.version == 6 and address.is_link_local


cell = module(
    "devices",
    "Network devices of the node and their addresses",
    config(DeviceSettings),
    provide(device_table, PodMtu),
    provide_private(NetlinkKernel, as_=(Kernel,)),
)
