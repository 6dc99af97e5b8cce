"""IPAM settings, automatically chosen ranges, and ranges saved for the next run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Final

import msgspec
from msgspec import field

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.node.devices import Device
from lifecycle import HiveError, Logger, Settings
from lifecycle.settings import read_regular

__all__ = [
    "IpamSettings",
    "PodAddressing",
    "SavedRanges",
    "automatic_range",
    "nested_range",
    "pod_addressing",
    "saved_ranges",
]


MODES: Final = ("cluster-pool", "kubernetes", "multi-pool", "delegated-plugin")
DEFAULT_PRE_ALLOCATION: Final = 8
"""Pre-allocated addresses of the default pool."""
_OTHER_MODES: Final = {
    "crd",
    "eni",
    "azure",
    "alibabacloud",
}
_PRIVATE: Final = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918
_RESERVED: Final = tuple(map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")))  # RFC 6890
_RESERVED6: Final = tuple(map(IPv6Network, ("::/96", "::ffff:0:0/96", "fe80::/10", "ff00::/8")))
_OUR_DEVICES: Final = ("cilium_", "lxc")


class PodAddressing(msgspec.Struct, frozen=True):
    """The configured sources of pod addresses."""

    mode: str
    """The IPAM mode, named as in Cilium."""
    ranges: Mapping[Family, IPNetwork]
    """Configured ranges; they take precedence over assigned ones."""
    routers: Mapping[Family, IPAddress]
    """Configured addresses of the pods' gateway, instead of addresses of the ranges."""
    nested: IPv6Network
    """The /64 of an automatic IPv6 range."""
    default_pool: str
    """The pool of pods that do not choose another one."""
    pre_allocation: Mapping[str, int]
    """Pre-allocated addresses by pool in multi-pool."""

    @property
    def pooled(self) -> bool:
        """Whether pods choose among pools."""
        return self.mode == "multi-pool"


class IpamSettings(Settings, frozen=True):
    """Settings of IPAM."""

    ipam: str = "cluster-pool"
    """Source of this node's pod ranges: cluster-pool, its CiliumNode; kubernetes, its Node; multi-pool, its
    CiliumNode, from the pools that pods choose; delegated-plugin, the IPAM plugin in the CNI configuration.
    In the first two, ipv4-range and ipv6-range are used if they are set, or if there is no source of objects.
    """

    ipv4_range: str = "auto"
    """Network of this node's pods; auto: the previous one, at first 10.X.0.0/16 where X is the last byte of
    the node's address.
    """

    ipv6_range: str = "auto"
    """IPv6 network of this node's pods; auto: the previous one, at first derived from ipv6-cluster-alloc-cidr
    and the IPv4 network.
    """

    ipv6_cluster_alloc_cidr: str = "f00d::/64"
    """The /64 that ipv6-range=auto starts with; the next 32 bits are the IPv4 network's address."""

    ipam_default_ip_pool: str = "default"
    """Name of the pool of pods that do not choose another one in multi-pool."""

    ipam_multi_pool_pre_allocation: dict[str, str] = field(default_factory=dict)
    """Pre-allocated free addresses by pool in multi-pool, as POOL=COUNT; the start waits for them. Unset: 8
    of the default pool.
    """

    local_router_ipv4: str = ""
    """IPv4 address of the pods' gateway, instead of one of the node's range; needs enable-endpoint-routes and
    routing-mode=native.
    """

    local_router_ipv6: str = ""
    """IPv6 address of the pods' gateway, with the same requirements."""

    def validate(self) -> None:
        """Reject unknown modes, invalid ranges, and invalid router addresses. Raises ValueError."""
        if self.ipam in _OTHER_MODES:
            raise ValueError(
                f"ipam={self.ipam} is not supported yet: expected {', '.join(MODES[:-1])} or {MODES[-1]}"
            )
        if self.ipam not in MODES:
            raise ValueError(
                f"ipam={self.ipam}: unknown IPAM backend, expected {', '.join(MODES[:-1])} or {MODES[-1]}"
            )
        if not self.ipam_default_ip_pool:
            raise ValueError("ipam-default-ip-pool is empty: expected a name")
        self.pre_allocation()
        for family in Family:
            self.explicit_range(family)
            self.local_router(family)
        self.cluster_alloc_network()

    def pre_allocation(self) -> dict[str, int]:
        """Return the pre-allocated addresses by pool. Raises ValueError."""
        found = {}
        for pool, text in self.ipam_multi_pool_pre_allocation.items():
            if not (text.isascii() and text.isdigit()):
                raise ValueError(
                    f'ipam-multi-pool-pre-allocation: invalid value for pool "{pool}": {text}:'
                    " expected a number"
                )
            found[pool] = int(text)
        return found or {self.ipam_default_ip_pool: DEFAULT_PRE_ALLOCATION}

    def explicit_range(self, family: Family) -> IPNetwork | None:
        """Return the configured range, or None for auto. Host bits are ignored, as in Cilium.

        Raises ValueError.
        """
        text = self.ipv4_range if family is Family.IPV4 else self.ipv6_range
        return None if text == "auto" else parse_range(family, text)

    def local_router(self, family: Family) -> IPAddress | None:
        """Return the configured gateway address, or None. Raises ValueError."""
        text = self.local_router_ipv4 if family is Family.IPV4 else self.local_router_ipv6
        if not text:
            return None
        try:
            ip: IPAddress | None = ip_address(text)
        except ValueError:
            ip = None
        if ip is None or Family.of(ip) is not family or _has_reserved_addresses(ip_network(ip)):
            example = "169.254.23.0" if family is Family.IPV4 else "fd00:23::1"
            raise ValueError(
                f"local-router-{family}={text}: expected an {family.text} address such as {example}"
            )
        return ip

    def cluster_alloc_network(self) -> IPv6Network:
        """Return the /64 of automatic IPv6 ranges. Raises ValueError."""
        text = self.ipv6_cluster_alloc_cidr
        try:
            network: IPv6Network | None = IPv6Network(text, strict=False)
        except ValueError:
            network = None
        if network is None or network.prefixlen != 64 or _has_reserved_addresses(network):
            raise ValueError(f"ipv6-cluster-alloc-cidr={text}: expected a /64 such as f00d::/64")
        return network


def pod_addressing(settings: IpamSettings) -> PodAddressing:
    """Return the configured sources of pod addresses. Raises ValueError."""
    ranges = {family: network for family in Family if (network := settings.explicit_range(family))}
    routers = {family: ip for family in Family if (ip := settings.local_router(family))}
    return PodAddressing(
        settings.ipam,
        ranges,
        routers,
        nested=settings.cluster_alloc_network(),
        default_pool=settings.ipam_default_ip_pool,
        pre_allocation=settings.pre_allocation(),
    )


def parse_range(family: Family, text: str) -> IPNetwork:
    """Parse a range. Raises ValueError that names the setting."""
    given = f"{family}-range={text}"
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        network = None
    if network is None or Family.of(network) is not family or "/" not in text:
        example = "10.5.0.0/16" if family is Family.IPV4 else "fd00:5::/112"
        raise ValueError(f"{given}: expected auto or a network such as {example}")
    if network.prefixlen < 2:
        raise ValueError(f"{given}: too wide, expected at least a /2")
    if network.prefixlen == network.max_prefixlen:
        smallest = network.max_prefixlen - 1
        raise ValueError(f"{given}: too small, expected at most a /{smallest}: the node takes one address")
    if _has_reserved_addresses(network):
        raise ValueError(f"{given}: expected unicast addresses that are not reserved")
    return network


def _has_reserved_addresses(network: IPNetwork) -> bool:
    """Whether the network overlaps reserved addresses: loopback, multicast and others."""
    if isinstance(network, IPv4Network):
        return any(network.overlaps(reserved) for reserved in _RESERVED)
    return any(network.overlaps(reserved) for reserved in _RESERVED6)


def nested_range(base: IPv6Network, ipv4: IPv4Network) -> IPv6Network:
    """Return the /96 in ``base`` for an IPv4 range: its address is in bits 64 to 95, as in Cilium."""
    number = int(base.network_address) | int(ipv4.network_address) << 32
    return IPv6Network((number, 96))


def automatic_range(devices: Iterable[Device]) -> IPv4Network | None:
    """Return 10.X.0.0/16, where X is the last byte of the node's first global address.

    Public addresses come before private ones; None without a global address. Devices are sorted by index, lo
    last; ours are ignored, as are those that the setting ``devices`` excludes.
    """
    found = list(_global_addresses(devices))
    public = [ip for ip in found if not any(ip in network for network in _PRIVATE)]
    for ip in public or found:
        return IPv4Network((bytes([10, ip.packed[3], 0, 0]), 16))
    return None


def _global_addresses(devices: Iterable[Device]) -> Iterator[IPv4Address]:
    for device in sorted(devices, key=lambda device: (device.name == "lo", device.ifindex)):
        if device.name.startswith(_OUR_DEVICES) or not device.selected:
            continue
        for interface in device.addresses:
            ip = interface.ip
            if not isinstance(ip, IPv4Address):
                continue
            if not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified):
                yield ip


# Ranges in use, saved for the next run.

FILE: Final = "pod-ranges.json"
POOLS_FILE: Final = "pod-pools.json"


class SavedRanges(msgspec.Struct, frozen=True):
    """Ranges that the previous run used."""

    primary: Mapping[Family, IPNetwork]
    """The primary range of each family."""
    assigned: frozenset[Family]
    """Families with a range that was assigned by Kubernetes or the operator."""


class _RangesFile(msgspec.Struct, omit_defaults=True):
    ipv4: str = ""
    ipv6: str = ""
    assigned: tuple[Family, ...] = ()


def saved_ranges(state_dir: Path, log: Logger) -> SavedRanges:
    """Return the ranges of save_ranges(); empty without a file. An unusable file is logged."""
    path = state_dir / FILE
    try:
        saved = msgspec.json.decode(read_regular(path), type=_RangesFile)
        texts = {Family.IPV4: saved.ipv4, Family.IPV6: saved.ipv6}
        ranges = {family: parse_range(family, text) for family, text in texts.items() if text}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("saved pod ranges not read, choosing new ones", path=str(path), error=str(error))
    else:
        return SavedRanges(ranges, frozenset(saved.assigned) & ranges.keys())
    return SavedRanges({}, frozenset())


def save_ranges(state_dir: Path, ranges: SavedRanges) -> None:
    """Save ranges atomically. Raises HiveError."""
    path = state_dir / FILE
    ipv4, ipv6 = (str(ranges.primary.get(family, "")) for family in (Family.IPV4, Family.IPV6))
    _write(path, _RangesFile(ipv4, ipv6, tuple(sorted(ranges.assigned))))


def saved_pools(state_dir: Path, log: Logger) -> dict[str, tuple[IPNetwork, ...]]:
    """Return the ranges by pool of save_pools(); empty without a file. An unusable file is logged."""
    path = state_dir / POOLS_FILE
    try:
        saved = msgspec.json.decode(read_regular(path), type=dict[str, list[str]])
        return {pool: tuple(map(ip_network, texts)) for pool, texts in saved.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("saved ranges of earlier pools not read", path=str(path), error=str(error))
        return {}


def save_pools(state_dir: Path, pools: Mapping[str, Sequence[IPNetwork]]) -> None:
    """Save ranges by pool atomically. Raises HiveError."""
    _write(state_dir / POOLS_FILE, {pool: [str(one) for one in networks] for pool, networks in pools.items()})


def _write(path: Path, saved: object) -> None:
    temporary = path.with_suffix(".new")
    try:
        temporary.write_bytes(msgspec.json.encode(saved))
        temporary.replace(path)
    except OSError as error:
        raise HiveError(f"cannot save the ranges of pods' addresses in {path}: {error.strerror}") from error
