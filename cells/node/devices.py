"""The node's network devices and their addresses, as a table.

Source: watches rtnetlink, fills Table[int, Device] (key: ifindex). Pods' links (lxc*, tmp*) are left out.
Why:    the pod range, the MTU and the host addresses in the datapath's maps follow from the devices, and
        change with them.
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


# Which devices are the node's uplinks.

ANY: Final = "+"
"""At the end of a name: any that begins so, as iptables has it."""
_NAME: Final = re.compile(r"[^\s/:+]{1,15}|[^\s/:+]{0,14}\+")
_SHOWN: Final = 32
"""Characters of a wrong name that an error shows."""


class DeviceSettings(Settings, frozen=True):
    """Which devices are the node's uplinks."""

    devices: tuple[str, ...] = ()
    """Devices through which packets leave the node; eth+ matches all names that start with eth; unset: every
    device that is up and has an address. They determine the node's address and the pods' MTU."""

    def faults(self) -> Iterator[str]:
        """What no device can be called (kernel: dev_valid_name in net/core/dev.c)."""
        wrong = [name for name in self.devices if not _NAME.fullmatch(name)]
        if wrong:
            shown = wrong[0] if len(wrong[0]) <= _SHOWN else f"{wrong[0][:_SHOWN]}..."
            yield (
                f"devices={','.join(self.devices)}: {shown} is not a name of a device; expected names such as"
                " eth0, or eth+"
            )


def matches(wanted: str, name: str) -> bool:
    """Whether a device's name is the wanted one, or begins with what precedes its +."""
    return name.startswith(wanted.removesuffix(ANY)) if wanted.endswith(ANY) else name == wanted


# A network device of the node, and what follows from all of them.

OTHERS = ("docker", "cni", "podman", "virbr")
"""How the names of other plugins' bridges begin; they are native only if ``devices`` names them."""
OTHER_KINDS = frozenset({"vxlan", "geneve", "dummy", "ipip", "ip6tnl", "sit", "gre", "wireguard"})
"""Tunnels, behind which are others' pods, and devices that lead nowhere; the same."""
MAC_LENGTH = 6
BARE_LENGTHS = (0, 4, 16)
"""Of devices without Ethernet headers: they have no address, or a tunnel's (linux/if_arp.h)."""
OURS = "cilium_"
"""How names of the agent's own devices begin."""
LOOPBACK = "lo"
DEFAULT_MTU = 1500


class Device(msgspec.Struct, frozen=True):
    """One link of the node that is not a pod's, with its addresses: IPv4, then IPv6.

    Those of a family are in the kernel's order (primary first). Link-local IPv6 addresses are left out:
    every link has one, and nothing follows from it.

    ``kind`` is what rtnetlink calls it ("veth", "vxlan" …), "" for hardware and lo.
    """

    ifindex: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    up: bool
    addresses: tuple[IPInterface, ...]
    selected: bool = True
    """Whether the setting ``devices`` lets it be an uplink."""
    named: bool = False
    """Whether that setting names it: programs are on it though its name or kind looks like others'."""

    @property
    def has_ethernet(self) -> bool:
        """Whether its packets begin with an Ethernet header; of L3 devices (tun, wireguard) they do not."""
        return len(self.mac) == MAC_LENGTH


def uplinks(devices: Iterable[Device]) -> list[Device]:
    """The devices packets may leave the node through, by index: addressed() and selected, but not lo."""
    return [device for device in addressed(devices) if device.selected and device.name != LOOPBACK]


def native_uplinks(devices: Iterable[Device]) -> list[Device]:
    """Those of uplinks() that programs are on, by index."""
    return [each for each in uplinks(devices) if _is_native(each)]


def _is_native(device: Device) -> bool:
    """Whether programs can be on the device, and it leads out."""
    if not device.has_ethernet and len(device.mac) not in BARE_LENGTHS:
        return False  # the format of its packets is unknown here
    return device.named or not (device.name.startswith(OTHERS) or device.kind in OTHER_KINDS)


def addressed(devices: Iterable[Device]) -> list[Device]:
    """The devices with which the node is in some network, by index: up, not ours, with an address."""
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
    """Called, it gives the MTU of pods' links, in bytes.

    It is what is configured, else the smallest of the uplinks, else 1500.
    """

    def __init__(self, agent: AgentConfig, devices: Table[int, Device]) -> None:
        self._configured = agent.mtu
        self.devices = devices
        """What it follows from."""
        self._found = (-1, DEFAULT_MTU)
        """At which revision of the devices, and what."""

    def __call__(self) -> int:
        if self._configured:
            return self._configured
        revision = self.devices.revision
        if self._found[0] != revision:
            self._found = (
                revision,
                min((one.mtu for one in uplinks(self.devices.all())), default=DEFAULT_MTU),
            )
        return self._found[1]


# Keeps Table[int, Device] equal to the kernel.
#
# Events are hints: they say that something changed, never what. After a burst everything is listed again.

SETTLE = 0.05
"""Seconds that hints are gathered after the first."""


class Kernel(Protocol):
    """The node's devices, as far as this cell touches them."""

    def devices(self) -> list[Device]:
        """Every device now."""
        ...

    def subscribed(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """While it is open, the callable waits until something has changed since its last call.

        It raises when changes may have been missed: subscribe again.
        """
        ...


class DeviceSource:
    """Writes the table: once before the start goes on, then whenever something changed."""

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
        """One item right after subscribing (what came before was missed), then one per burst of changes."""
        async with self._kernel.subscribed() as changed:
            yield
            while True:
                await changed()
                with anyio.move_on_after(self._settle):
                    while True:
                        await changed()
                yield

    def refresh(self) -> None:
        """Make the table equal to what the kernel has now."""
        found = {device.ifindex: self._selected(device) for device in self._kernel.devices()}
        with self._table.txn() as txn:
            for known in self._table.all():
                if known.ifindex not in found:
                    txn.delete(known.ifindex)
            for device in found.values():
                txn.put(device)

    def missing(self) -> list[str]:
        """What the setting ``devices`` names and the node does not have."""
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
    """The table by ifindex. What needs it starts once it holds the devices there are."""
    table: Table[int, Device] = Table("devices", key=lambda device: device.ifindex)
    source = DeviceSource(table, kernel, settings)
    selection = health.child("selection")

    def report() -> str:
        """What is wrong with the selection, empty if nothing."""
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


# The node's devices in the real kernel.
#
# A pod makes a handful of link events, and one of its link's IPv6 address: a filter keeps those in the
# kernel.

PODS = ("lxc", "tmp")
"""How names of pods' links begin: ``lxc`` for good, ``tmp`` until the stock plugin has moved a peer."""

_RTMGRP_LINK = 0x1
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_RTM_NEWADDR, _RTM_DELADDR = 20, 21
_LINK_LOCAL = 0x0A0000FD  # the first word of an ifaddrmsg, but its length and flags: AF_INET6, RT_SCOPE_LINK
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
"""Lets everything through but news of links with names of :data:`PODS`, and of link-local IPv6 addresses."""


class NetlinkKernel:
    """Lists with packed messages, watches without reading any."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def devices(self) -> list[Device]:
        """Every link but the pods'; 1 ms for a hundred."""
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
            for link in self._links.links(without=PODS)
        ]

    def subscribed(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Links and addresses. A socket that overran (ENOBUFS) or broke raises from the wait."""
        return subscribed(_RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR, FILTER)


def link_local6(address: IPAddress) -> bool:
    """Whether it is an IPv6 address that every link has by itself, and that means nothing off the link."""
    return address.version == 6 and address.is_link_local


def netlink_kernel(links: HostLinks) -> Kernel:
    """The real kernel of the device table."""
    return NetlinkKernel(links)


cell = module(
    "devices",
    "Network devices of the node and their addresses",
    config(DeviceSettings),
    provide(device_table, PodMtu),
    provide_private(netlink_kernel),
)
