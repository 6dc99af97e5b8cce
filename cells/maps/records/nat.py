"""What is inside the maps of translated flows and of native devices.

For:    every cell that reads or writes them. Needs: nothing. Gives: NatEntry, DeviceConfig and its flags.
Source: Cilium 1.16/1.17 map ABI for cilium_snat_*; hive_devices is our own (bpf/netdev/maps.h).
Keys of cilium_snat_* are a CtKey's bytes; their addresses and ports are those of the packet.
"""

import struct
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import IPAddress, Layout

DEVICE_IP_MASQ: Final = 1
"""cilium_ipmasq_v4 and v6 are asked."""
DEVICE_REMOTE_NODES: Final = 2
"""Packets of pods to other nodes are masqueraded too."""
DEVICE_MASQUERADE_IPV4: Final = 4
"""Pods' IPv4 packets leave with the device's address."""
DEVICE_MASQUERADE_IPV6: Final = 8
"""The same for IPv6."""
DEVICE_XDP: Final = 16
"""It has a program in its driver, too."""
DEVICE_PROXIES: Final = 32
"""A proxy may send in pods' names by it: what it brings is looked at for answers."""
DEVICE_FLAGS: Final = {
    DEVICE_MASQUERADE_IPV4: "masquerades IPv4",
    DEVICE_MASQUERADE_IPV6: "masquerades IPv6",
    DEVICE_IP_MASQ: "exceptions of ip-masq-agent",
    DEVICE_REMOTE_NODES: "masquerades to other nodes",
    DEVICE_XDP: "XDP",
    DEVICE_PROXIES: "answers to proxies",
}
"""In words, for people."""

_NO_IPV4, _NO_IPV6 = IPv4Address(0), IPv6Address(0)

_port = struct.Struct(">H")
_nat4 = Layout("nat4_entry", created="Q", needs_ct="Q", pad="16x", address="4s", port="2s", pad2="2x")
_nat6 = Layout("nat6_entry", created="Q", needs_ct="Q", pad="16x", address="16s", port="2s", pad2="6x")
_device = Layout(
    "device_config",
    ipv4="4s",
    flags="I",
    ipv6="16s",
    native4="4s",
    native4_mask="4s",
    native6="16s",
    native6_prefix="I",
    announces="I",
    mac="6s2x",
)

NAT4_ENTRY: Final = _nat4.size
NAT6_ENTRY: Final = _nat6.size
"""Bytes of the values of each family."""


class NatEntry(msgspec.Struct, frozen=True):
    """Value of cilium_snat_v4_external (40 bytes) and cilium_snat_v6_external (56 bytes)."""

    address: IPAddress
    port: int
    created: int = 0
    """Nanoseconds of CLOCK_MONOTONIC."""
    needs_ct: bool = False
    """The flow is the node's own."""

    def pack(self) -> bytes:
        layout = _nat4 if self.address.version == 4 else _nat6
        return layout.pack(self.created, self.needs_ct, self.address.packed, _port.pack(self.port))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        layout = _nat4 if len(data) == NAT4_ENTRY else _nat6
        created, needs_ct, address, port = layout.unpack(data)
        return cls(ip_address(address), _port.unpack(port)[0], created, bool(needs_ct))


class DeviceConfig(msgspec.Struct, frozen=True):
    """Value of hive_devices, 64 bytes: how packets of pods leave by a device."""

    SIZE: ClassVar = _device.size

    mac: bytes
    """Zeros: its packets have no Ethernet header."""
    ipv4: IPv4Address | None = None
    """What they come from."""
    ipv6: IPv6Address | None = None
    native4: IPv4Network | None = None
    """Nothing is masqueraded on its way there."""
    native6: IPv6Network | None = None
    flags: int = 0
    """DEVICE_*."""
    announces: int = 0
    """Milliseconds for which it answers for services after the agent was alive; 0: never."""

    @property
    def l3(self) -> bool:
        """Whether its packets begin with the network header."""
        return not any(self.mac)

    def pack(self) -> bytes:
        network, prefix = (_NO_IPV4.packed, _NO_IPV4.packed), (_NO_IPV6.packed, 0)
        if self.native4 is not None:
            network = self.native4.network_address.packed, self.native4.netmask.packed
        if self.native6 is not None:
            prefix = self.native6.network_address.packed, self.native6.prefixlen
        addresses = (self.ipv4 or _NO_IPV4).packed, self.flags, (self.ipv6 or _NO_IPV6).packed
        return _device.pack(*addresses, *network, *prefix, self.announces, self.mac)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ipv4, flags, ipv6, network, mask, network6, prefix, announces, mac = _device.unpack(data)
        return cls(
            mac,
            IPv4Address(ipv4) if any(ipv4) else None,
            IPv6Address(ipv6) if any(ipv6) else None,
            IPv4Network((network, IPv4Address(mask).compressed)) if any(mask) else None,
            IPv6Network((network6, prefix)) if prefix else None,
            flags,
            announces,
        )
