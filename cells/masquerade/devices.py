"""Native devices: which get programs, with which masquerade address; and the reconciler's target."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

import msgspec
from msgspec import structs

from cells.cluster.encryption import WIREGUARD_LINKS
from cells.datapath.datapath import Datapath
from cells.maps.map import Map
from cells.maps.records.flows import (
    DEVICE_IP_MASQ,
    DEVICE_MASQUERADE_IPV4,
    DEVICE_MASQUERADE_IPV6,
    DEVICE_PROXIES,
    DEVICE_REMOTE_NODES,
    DEVICE_XDP,
    DeviceConfig,
)
from cells.netlink.connection import NetlinkError
from cells.node.addresses import device_addresses, masquerade_address, node_addresses
from cells.node.devices import Device, matches, native_uplinks
from lifecycle import HiveError, Logger, Settings
from lifecycle.tables import BatchFailures

__all__ = ["MasqueradeSettings", "NativeDevice"]


# Settings.


class MasqueradeSettings(Settings, frozen=True):
    """Settings of masquerading, under Cilium's names."""

    enable_ipv4_masquerade: bool | None = None
    """Masquerade pods' IPv4 packets with the node's address; unset: true, unless another plugin makes the
    pods' links (cni-chaining-mode)."""

    enable_ipv6_masquerade: bool | None = None
    """The same for IPv6."""

    enable_bpf_masquerade: bool = True
    """Masquerade in eBPF; there is no iptables implementation."""

    ipv4_native_routing_cidr: IPv4Network | None = None
    """Network in which pod addresses are routed: packets to it are not masqueraded; unset: the node's pod
    CIDR.
    """

    ipv6_native_routing_cidr: IPv6Network | None = None
    """The same for IPv6."""

    egress_masquerade_interfaces: tuple[str, ...] = ()
    """Devices to masquerade on; eth+ matches all names that start with eth; unset: all native devices."""

    derive_masq_ip_addr_from_device: str = ""
    """The device with the source address of masqueraded packets; unset: the device that they leave through.
    """

    enable_ip_masq_agent: bool = False
    """Do not masquerade packets to the networks in ip-masq-agent's file."""

    ip_masq_agent_config_path: Path = Path("/etc/config/ip-masq-agent")
    """Path of ip-masq-agent's file, YAML or JSON; without a file, private and reserved networks are used."""

    def faults(self) -> Iterator[str]:
        wants = (self.enable_ipv4_masquerade, self.enable_ipv6_masquerade)
        if not self.enable_bpf_masquerade and wants != (False, False):
            yield (
                "enable-bpf-masquerade=false: iptables rules are not supported; masquerade by eBPF with"
                " enable-bpf-masquerade=true, or not at all with enable-ipv4-masquerade=false and"
                " enable-ipv6-masquerade=false"
            )


MAC_LENGTH = 6
IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


class NativeDevice(msgspec.Struct, frozen=True):
    """A row of the table ``native-devices``: a device with programs, and its value in hive_devices."""

    ifindex: int
    name: str
    config: DeviceConfig


class ProgramNeeds(msgspec.Struct, frozen=True):
    """Which families are masqueraded, this node's pod CIDRs, and other features that need programs."""

    ranges: Collection[IPNetwork]
    ipv4: bool
    ipv6: bool
    tunnelled: bool = False
    """Whether pods are only reached through tunnels, so that other nodes have no routes to them."""
    serves_outside: bool = False
    """Whether NodePort, the host policy or egress gateways need programs on all devices."""
    accelerated: bool = False
    """Whether external clients are served by XDP."""
    announces: int = 0
    """Milliseconds after the agent's last heartbeat during which devices answer ARP for services; 0: never.
    """
    proxied: bool = False
    """Whether a proxy sends packets with pods' source addresses, so that replies must be redirected to it."""
    encrypted: bool = False
    """Whether WireGuard encrypts pods' packets; decrypted ones arrive at its devices."""

    @property
    def on_all_devices(self) -> bool:
        """Whether all devices need programs, even without masquerading."""
        return self.serves_outside or bool(self.announces) or self.proxied or self.encrypted


def native_devices(
    devices: Iterable[Device],
    settings: MasqueradeSettings,
    needs: ProgramNeeds,
    node_ips: Sequence[IPAddress],
) -> dict[int, NativeDevice]:
    """Return the devices that need programs, by index."""
    if not (needs.ipv4 or needs.ipv6 or needs.on_all_devices):
        return {}
    devices = list(devices)
    native = native_uplinks(devices)
    rows = node_addresses([device_addresses(each, native) for each in devices], node_ips)
    native4, native6 = native_networks(settings, needs.ranges)
    decrypting = [each for each in devices if needs.encrypted and each.name in WIREGUARD_LINKS and each.up]
    flags = DEVICE_IP_MASQ * settings.enable_ip_masq_agent | DEVICE_REMOTE_NODES * needs.tunnelled
    flags |= DEVICE_PROXIES * needs.proxied
    found: dict[int, NativeDevice] = {}
    for device in (*native, *decrypting):
        interfaces = settings.egress_masquerade_interfaces
        masquerades = device.name not in WIREGUARD_LINKS and (
            not interfaces or any(matches(each, device.name) for each in interfaces)
        )
        if not (masquerades or needs.on_all_devices):
            continue
        ipv4, ipv6 = (
            _routable(
                masquerade_address(
                    rows, device.name, version, derive_from=settings.derive_masq_ip_addr_from_device
                )
            )
            if enabled and masquerades
            else None
            for version, enabled in ((4, needs.ipv4), (6, needs.ipv6))
        )
        config_of_device = DeviceConfig(
            device.mac if device.has_ethernet else bytes(MAC_LENGTH),
            ipv4 if isinstance(ipv4, IPv4Address) else None,
            ipv6 if isinstance(ipv6, IPv6Address) else None,
            native4,
            native6,
            flags
            | DEVICE_MASQUERADE_IPV4 * (ipv4 is not None)
            | DEVICE_MASQUERADE_IPV6 * (ipv6 is not None)
            | DEVICE_XDP * (needs.accelerated and device.has_ethernet),
            needs.announces,
        )
        found[device.ifindex] = NativeDevice(device.ifindex, device.name, config_of_device)
    return found


def _routable(address: IPAddress | None) -> IPAddress | None:
    """Return the address unless it is a loopback address, to which external hosts cannot reply."""
    return None if address is None or address.is_loopback else address


def native_networks(
    settings: MasqueradeSettings, ranges: Iterable[IPNetwork]
) -> tuple[IPv4Network | None, IPv6Network | None]:
    """Return the native routing CIDR of each family: the setting, else the node's pod CIDR."""
    own = list(ranges)
    native4 = settings.ipv4_native_routing_cidr
    native6 = settings.ipv6_native_routing_cidr
    return (
        native4 or next((each for each in own if isinstance(each, IPv4Network)), None),
        native6 or next((each for each in own if isinstance(each, IPv6Network)), None),
    )


# The reconciler's target: programs of native devices, and hive_devices.

_INDEX = struct.Struct("<I")


class DeviceTarget:
    """Writes hive_devices before it attaches programs: without its row a program passes all packets.

    DEVICE_XDP is set only after the XDP program is attached: other devices redirect packets to a device with
    it.
    """

    def __init__(
        self,
        rows: Callable[[], Map],
        programs: Datapath,
        log: Logger,
    ) -> None:
        self._rows = rows
        self._programs = programs
        self._log = log
        self._unsupported: dict[int, str] = {}
        """Names of devices without driver support for XDP, by index."""

    async def observe(self) -> Mapping[int, bytes]:
        """Read the rows of hive_devices."""
        return {_INDEX.unpack(key)[0]: value for key, value in self._rows().items()}

    def matches(self, row: NativeDevice, observed: bytes) -> bool:
        """Return whether the row is up to date and the programs are attached."""
        config = row.config
        if self._unsupported.get(row.ifindex) == row.name:
            config = _clear_xdp_flag(config)
        if config.pack() != observed:
            return False
        try:
            accelerated = bool(config.flags & DEVICE_XDP)
            return self._programs.serves_device(row.ifindex, l3=config.l3, accelerated=accelerated)
        except NetlinkError:
            return False

    async def put(self, batch: Mapping[int, NativeDevice]) -> None:
        """Write rows and attach programs. Raises BatchError."""
        with BatchFailures(OSError, HiveError) as failures:
            for ifindex, device in batch.items():
                with failures.of(ifindex):
                    await self._put(device)

    async def drop(self, batch: Collection[int]) -> None:
        """Detach programs and delete rows. Raises BatchError."""
        with BatchFailures(NetlinkError) as failures:
            for ifindex in batch:
                self._unsupported.pop(ifindex, None)
                with failures.of(ifindex):
                    self._detach(ifindex)
                    self._rows().delete(_INDEX.pack(ifindex))

    def _detach(self, ifindex: int) -> None:
        try:
            self._programs.detach_device(ifindex)
        except NetlinkError as error:
            if error.errno != errno.ENODEV:
                raise

    async def _put(self, device: NativeDevice) -> None:
        key, config = _INDEX.pack(device.ifindex), device.config
        if config.l3:
            await self._programs.prepare_l3()
        self._rows().update(key, _clear_xdp_flag(config).pack())
        self._programs.attach_device(device.ifindex, l3=config.l3)
        if not config.flags & DEVICE_XDP:
            self._programs.detach_xdp(device.ifindex)
        elif self._programs.attach_xdp(device.ifindex):
            self._unsupported.pop(device.ifindex, None)
            self._rows().update(key, config.pack())
        elif self._unsupported.get(device.ifindex) != device.name:
            self._unsupported[device.ifindex] = device.name
            self._log.warning(
                "the driver does not support XDP: external clients are served by tc", device=device.name
            )


def _clear_xdp_flag(config: DeviceConfig) -> DeviceConfig:
    return structs.replace(config, flags=config.flags & ~DEVICE_XDP)
