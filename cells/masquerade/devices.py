"""Native devices with programs, and the masquerade address of each."""

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


# Settings of masquerading, under Cilium's names.


class MasqueradeSettings(Settings, frozen=True):
    """Which of the pods' packets leave with the node's address."""

    enable_ipv4_masquerade: bool | None = None
    """Masquerade pods' IPv4 packets with the node's address; unset: true, unless another plugin makes the
    pods' links (cni-chaining-mode)."""

    enable_ipv6_masquerade: bool | None = None
    """The same for IPv6."""

    enable_bpf_masquerade: bool = True
    """Masquerade in eBPF; there is no iptables implementation."""

    ipv4_native_routing_cidr: IPv4Network | None = None
    """Network in which pod addresses are routed: packets to it are not masqueraded; unset: the pods'
    range."""

    ipv6_native_routing_cidr: IPv6Network | None = None
    """The same for IPv6."""

    egress_masquerade_interfaces: tuple[str, ...] = ()
    """Devices to masquerade on; eth+ matches all names that start with eth; unset: all through which packets
    leave the node."""

    derive_masq_ip_addr_from_device: str = ""
    """The device with the address of masqueraded packets; unset: the device they leave through."""

    enable_ip_masq_agent: bool = False
    """Also do not masquerade packets to the networks in ip-masq-agent's file."""

    ip_masq_agent_config_path: Path = Path("/etc/config/ip-masq-agent")
    """Path of that file, YAML or JSON; without one, private and reserved networks are used."""

    def faults(self) -> Iterator[str]:
        wants = (self.enable_ipv4_masquerade, self.enable_ipv6_masquerade)
        if not self.enable_bpf_masquerade and wants != (False, False):
            yield (
                "enable-bpf-masquerade=false: rules of iptables are not made; masquerade by eBPF with"
                " enable-bpf-masquerade=true, or not at all with enable-ipv4-masquerade=false and"
                " enable-ipv6-masquerade=false"
            )


MAC_LENGTH = 6
IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


class NativeDevice(msgspec.Struct, frozen=True):
    """A device with programs, and its row in hive_devices."""

    ifindex: int
    name: str
    config: DeviceConfig


class Families(msgspec.Struct, frozen=True):
    """Which families are masqueraded, and the pods' range of each."""

    ranges: Collection[IPNetwork]
    ipv4: bool
    ipv6: bool
    tunnelled: bool = False
    """Whether only tunnels lead to pods, so that other nodes know no way back to them."""
    serves_outside: bool = False
    """Whether clients outside are served, the node has a policy, or it may be an egress gateway: for that all
    devices need programs."""
    accelerated: bool = False
    """Whether clients outside are served in devices' drivers."""
    announces: int = 0
    """Milliseconds for which devices answer for services after the agent was alive; 0: never."""
    proxied: bool = False
    """Whether a proxy sends in pods' names, so that answers come to it."""
    encrypted: bool = False
    """Whether WireGuard encrypts what leaves, and what it has decrypted comes by its own devices."""

    @property
    def everywhere(self) -> bool:
        """Whether all devices need programs, though nothing be masqueraded there."""
        return self.serves_outside or bool(self.announces) or self.proxied or self.encrypted


def native_devices(
    devices: Iterable[Device],
    settings: MasqueradeSettings,
    families: Families,
    node_ips: Sequence[IPAddress],
) -> dict[int, NativeDevice]:
    """Those with programs, by index."""
    if not (families.ipv4 or families.ipv6 or families.everywhere):
        return {}
    devices = list(devices)
    native = native_uplinks(devices)
    rows = node_addresses([device_addresses(each, native) for each in devices], node_ips)
    native4, native6 = native_networks(settings, families.ranges)
    decrypting = [each for each in devices if families.encrypted and each.name in WIREGUARD_LINKS and each.up]
    flags = DEVICE_IP_MASQ * settings.enable_ip_masq_agent | DEVICE_REMOTE_NODES * families.tunnelled
    flags |= DEVICE_PROXIES * families.proxied
    found: dict[int, NativeDevice] = {}
    for device in (*native, *decrypting):
        interfaces = settings.egress_masquerade_interfaces
        masquerades = device.name not in WIREGUARD_LINKS and (
            not interfaces or any(matches(each, device.name) for each in interfaces)
        )
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
        config_of_device = DeviceConfig(
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
        found[device.ifindex] = NativeDevice(device.ifindex, device.name, config_of_device)
    return found


def _answerable(address: IPAddress | None) -> IPAddress | None:
    """The address, unless hosts outside could not reply to it."""
    return None if address is None or address.is_loopback else address


def native_networks(
    settings: MasqueradeSettings, ranges: Iterable[IPNetwork]
) -> tuple[IPv4Network | None, IPv6Network | None]:
    """The native routing network of each family: as set, else the pods' range."""
    own = list(ranges)
    native4 = settings.ipv4_native_routing_cidr
    native6 = settings.ipv6_native_routing_cidr
    return (
        native4 or next((each for each in own if isinstance(each, IPv4Network)), None),
        native6 or next((each for each in own if isinstance(each, IPv6Network)), None),
    )


# Native devices in the kernel: their programs and rows. The target of a reconciler.

_INDEX = struct.Struct("<I")


class DeviceTarget:
    """Rows first, then programs: a program without its row lets everything pass.

    A row has the driver's program only once the driver has it: others send packets to such a device.
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
        self._slow: dict[int, str] = {}
        """Names of devices with drivers that cannot, by index."""

    async def observe(self) -> Mapping[int, bytes]:
        """The rows of devices."""
        return {_INDEX.unpack(key)[0]: value for key, value in self._rows().items()}

    def matches(self, row: NativeDevice, observed: bytes) -> bool:
        """Whether its row is right and its programs are attached."""
        config = row.config
        if self._slow.get(row.ifindex) == row.name:
            config = _without_driver(config)
        if config.pack() != observed:
            return False
        try:
            accelerated = bool(config.flags & DEVICE_XDP)
            return self._programs.serves_device(row.ifindex, l3=config.l3, accelerated=accelerated)
        except NetlinkError:
            return False

    async def put(self, batch: Mapping[int, NativeDevice]) -> None:
        """Attach to devices. Raises BatchError; a deleted one is dropped."""
        with BatchFailures(OSError, HiveError) as failures:
            for ifindex, device in batch.items():
                with failures.of(ifindex):
                    await self._put(device)

    async def drop(self, batch: Collection[int]) -> None:
        """Leave devices alone again. Raises BatchError."""
        with BatchFailures(NetlinkError) as failures:
            for ifindex in batch:
                self._slow.pop(ifindex, None)
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
        self._rows().update(key, _without_driver(config).pack())
        self._programs.attach_device(device.ifindex, l3=config.l3)
        if not config.flags & DEVICE_XDP:
            self._programs.slow_device(device.ifindex)
        elif self._programs.accelerate_device(device.ifindex):
            self._slow.pop(device.ifindex, None)
            self._rows().update(key, config.pack())
        elif self._slow.get(device.ifindex) != device.name:
            self._slow[device.ifindex] = device.name
            self._log.warning(
                "the driver does not support XDP: external clients are served by tc", device=device.name
            )


def _without_driver(config: DeviceConfig) -> DeviceConfig:
    return structs.replace(config, flags=config.flags & ~DEVICE_XDP)
