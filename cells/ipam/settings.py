"""Where pod addresses come from: the options, and the range a node chooses by itself.

For:    Ipam. Needs: rows of Table[Device]. Gives: IpamSettings, automatic_range().
"""

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from cells.devices import Device
from lifecycle import Settings

_OTHER_MODES: Final = {
    "kubernetes",
    "multi-pool",
    "delegated-plugin",
    "crd",
    "eni",
    "azure",
    "alibabacloud",
}
_PRIVATE: Final = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918
_NOT_FOR_PODS: Final = tuple(map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")))  # RFC 6890
_OUR_DEVICES: Final = ("cilium_", "lxc")


class IpamSettings(Settings, frozen=True):
    """Settings of the ipam cell."""

    ipam: str = "cluster-pool"
    """How addresses are managed. Without Kubernetes this node allocates from its own ipv4-range."""

    ipv4_range: str = "auto"
    """Network of this node's pods; auto: 10.X.0.0/16, X being the last byte of the node's address."""

    ipam_default_ip_pool: str = "default"
    """Name of the pool that addresses come from."""

    def validate(self) -> None:
        """Refuse modes that are not there and ranges that are none."""
        if self.ipam in _OTHER_MODES:
            raise ValueError(f"ipam={self.ipam} is not supported yet: use cluster-pool, with ipv4-range")
        if self.ipam != "cluster-pool":
            raise ValueError(f"ipam={self.ipam}: unknown IPAM backend, expected cluster-pool")
        if not self.ipam_default_ip_pool:
            raise ValueError("ipam-default-ip-pool is empty: expected a name")
        self.explicit_range()

    def explicit_range(self) -> IPv4Network | None:
        """The range as configured, None for auto; raises ValueError. Host bits are ignored, as in Cilium."""
        if self.ipv4_range == "auto":
            return None
        expected = f"ipv4-range={self.ipv4_range}: expected auto or a network such as 10.5.0.0/16"
        try:
            network = IPv4Network(self.ipv4_range, strict=False)
        except ValueError:
            raise ValueError(expected) from None
        if "/" not in self.ipv4_range:
            raise ValueError(expected)
        if network.prefixlen < 2:
            raise ValueError(f"ipv4-range={self.ipv4_range}: too wide, expected at least a /2")
        if network.prefixlen > 31:
            raise ValueError(
                f"ipv4-range={self.ipv4_range}: too small, expected at most a /31: the node takes one address"
            )
        if any(network.overlaps(reserved) for reserved in _NOT_FOR_PODS):
            raise ValueError(f"ipv4-range={self.ipv4_range}: expected addresses that hosts may have")
        return network


def automatic_range(devices: Iterable[Device]) -> IPv4Network | None:
    """10.<last byte of the node's first global address>.0.0/16, public addresses before private ones.

    None if the node has no global address. Devices count in the order of their indexes, ours do not.
    """
    found = list(_global_addresses(devices))
    public = [ip for ip in found if not any(ip in network for network in _PRIVATE)]
    for ip in public or found:
        return IPv4Network((bytes([10, ip.packed[3], 0, 0]), 16))
    return None


def _global_addresses(devices: Iterable[Device]) -> Iterator[IPv4Address]:
    for device in sorted(devices, key=lambda device: device.ifindex):
        if device.name.startswith(_OUR_DEVICES):
            continue
        for interface in device.addresses:
            ip = interface.ip
            if not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified):
                yield ip
