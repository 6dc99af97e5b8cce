"""Which devices packets leave the node through, and what pods' packets come from there.

For:    Masquerade.   Needs: nothing.   Gives: NativeDevice, native_devices().
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from cells.maps import (
    DEVICE_IP_MASQ,
    DEVICE_MASQUERADE_IPV4,
    DEVICE_MASQUERADE_IPV6,
    DEVICE_PROXIES,
    DEVICE_REMOTE_NODES,
    DEVICE_XDP,
    DeviceConfig,
)
from cells.masquerade.settings import MasqueradeSettings
from cells.node.addresses import device_addresses, masquerade_address, node_addresses
from cells.node.devices import Device, matches, native_uplinks

MAC_LENGTH = 6
IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class NativeDevice:
    """A device with programs: what they know of it."""

    ifindex: int
    name: str
    config: DeviceConfig


@dataclass(frozen=True, slots=True)
class Families:
    """Which families are masqueraded, and the pods' range of each."""

    ranges: Collection[IPNetwork]
    ipv4: bool
    ipv6: bool
    tunnelled: bool = False
    """Whether only tunnels lead to pods, so that other nodes know no way back to them."""
    serves_outside: bool = False
    """Whether clients outside are served, or the node has a policy: for that all devices need programs."""
    accelerated: bool = False
    """Whether clients outside are served in devices' drivers."""
    announces: int = 0
    """Milliseconds for which devices answer for services after the agent was alive; 0: never."""
    proxied: bool = False
    """Whether a proxy sends in pods' names, so that answers come to it."""

    @property
    def everywhere(self) -> bool:
        """Whether all devices need programs, though nothing be masqueraded there."""
        return self.serves_outside or bool(self.announces) or self.proxied


def native_devices(
    devices: Iterable[Device],
    settings: MasqueradeSettings,
    families: Families,
    node_ips: Sequence[IPAddress],
    *,
    chosen: bool,
) -> dict[int, NativeDevice]:
    """Those with programs, by index. ``chosen``: the setting ``devices`` names them."""
    if not (families.ipv4 or families.ipv6 or families.everywhere):
        return {}
    devices = list(devices)
    native = native_uplinks(devices, chosen=chosen)
    rows = node_addresses([device_addresses(each, native) for each in devices], node_ips)
    native4, native6 = native_networks(settings, families.ranges)
    flags = DEVICE_IP_MASQ * settings.enable_ip_masq_agent | DEVICE_REMOTE_NODES * families.tunnelled
    flags |= DEVICE_PROXIES * families.proxied
    found: dict[int, NativeDevice] = {}
    for device in native:
        interfaces = settings.egress_masquerade_interfaces
        masquerades = not interfaces or any(matches(each, device.name) for each in interfaces)
        if not (masquerades or families.everywhere):
            continue
        ipv4, ipv6 = (
            _answerable(
                masquerade_address(
                    rows, device.name, version, derive_from=settings.derive_masq_ip_addr_from_device
                )
            )
            if enabled and masquerades
            else None
            for version, enabled in ((4, families.ipv4), (6, families.ipv6))
        )
        told = DeviceConfig(
            device.mac if device.has_ethernet else bytes(MAC_LENGTH),
            ipv4 if isinstance(ipv4, IPv4Address) else None,
            ipv6 if isinstance(ipv6, IPv6Address) else None,
            native4,
            native6,
            flags
            | DEVICE_MASQUERADE_IPV4 * (ipv4 is not None)
            | DEVICE_MASQUERADE_IPV6 * (ipv6 is not None)
            | DEVICE_XDP * (families.accelerated and device.has_ethernet),
            families.announces,
        )
        found[device.ifindex] = NativeDevice(device.ifindex, device.name, told)
    return found


def _answerable(address: IPAddress | None) -> IPAddress | None:
    """The address, unless hosts outside could not reply to it."""
    return None if address is None or address.is_loopback else address


def native_networks(
    settings: MasqueradeSettings, ranges: Iterable[IPNetwork]
) -> tuple[IPv4Network | None, IPv6Network | None]:
    """Where nothing is masqueraded to, of each family: what the settings say, else the pods' range."""
    own = list(ranges)
    native4 = settings.ipv4_native_routing_cidr
    native6 = settings.ipv6_native_routing_cidr
    return (
        native4 or next((each for each in own if isinstance(each, IPv4Network)), None),
        native6 or next((each for each in own if isinstance(each, IPv6Network)), None),
    )
