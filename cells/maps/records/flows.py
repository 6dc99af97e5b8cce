"""Records of the maps about flows: conntrack, fragments, NAT, devices, sockets, NodePort, metrics.

Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses, ports and NAT indexes in network order.
"""

import struct
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records import IPAddress, Layout

__all__ = [
    "CT_IN",
    "CT_OUT",
    "CT_RELATED",
    "CT_SERVICE",
    "DEVICE_IP_MASQ",
    "DEVICE_MASQUERADE_IPV4",
    "DEVICE_MASQUERADE_IPV6",
    "DEVICE_PROXIES",
    "DEVICE_REMOTE_NODES",
    "DEVICE_XDP",
    "ENCRYPTION_NODES",
    "ENCRYPTION_STRICT",
    "ENCRYPTION_STRICT_NODES",
    "METRIC_EGRESS",
    "METRIC_INGRESS",
    "METRIC_SERVICE",
    "NODEPORT_DSR_CHOSEN",
    "NODEPORT_DSR_OTHER",
    "NODEPORT_DSR_TCP",
    "NODEPORT_MAGLEV",
    "NODEPORT_ON",
    "NODEPORT_XDP",
    "SOCK_BIND_PROTECTION",
    "SOCK_HOST_ONLY",
    "SOCK_REJECTS",
    "SOCK_TRUSTS_EXTERNAL_IP",
    "CtEntry",
    "CtKey",
    "DeviceConfig",
    "EncryptionConfig",
    "FragmentPorts",
    "MetricsKey",
    "MetricsValue",
    "NatEntry",
    "NodePortConfig",
    "ReverseSk",
    "ReverseSkKey",
    "SkipLbKey",
    "SockConfig",
]


CT_OUT: Final = 0
CT_IN: Final = 1
CT_RELATED: Final = 2
CT_SERVICE: Final = 4

_port = struct.Struct(">H")
_ports = struct.Struct(">HH")
_ct_tail = Layout("ct_tail", dport="2s", sport="2s", protocol="B", flags="B")
_ct4_key = Layout("ct4_key", daddr="4s", saddr="4s", tail="6s")
_ct6_key = Layout("ct6_key", daddr="16s", saddr="16s", tail="6s")
_ct_entry = Layout(
    "ct_entry",
    verdict="Q",
    backend_id="Q",
    packets="Q",
    bytes="Q",
    lifetime="I",
    _bits="H",
    rev_nat_index="2s",
    ifindex="H",
    tx_flags_seen="B",
    rx_flags_seen="B",
    source_identity="I",
    last_tx_report="I",
    last_rx_report="I",
)
_fragment4_key = Layout("fragment4_key", daddr="4s", saddr="4s", id="2s", protocol="B", pad="x")
_fragment6_key = Layout("fragment6_key", daddr="16s", saddr="16s", id="4s", protocol="B", pad="3x")
_fragment_ports = Layout("fragment_ports", sport="2s", dport="2s")

CT4_KEY: Final = _ct4_key.size
CT6_KEY: Final = _ct6_key.size
FRAGMENT4_KEY: Final = _fragment4_key.size
FRAGMENT6_KEY: Final = _fragment6_key.size
"""Key sizes in bytes, per family."""


class CtKey(msgspec.Struct, frozen=True):
    """Key of the conntrack maps: 14 bytes for IPv4, 38 for IPv6.

    Of a flow S:s -> D:d the entry has the addresses of the reply (``daddr`` S, ``saddr`` D) and the ports of
    the original (``dport`` d, ``sport`` s). ``flags``: CT_OUT, CT_IN, CT_RELATED, CT_SERVICE.
    """

    daddr: IPAddress
    saddr: IPAddress
    dport: int
    sport: int
    protocol: int
    flags: int = CT_OUT

    def pack(self) -> bytes:
        ports = _ports.pack(self.dport, self.sport)
        tail = _ct_tail.pack(ports[:2], ports[2:], self.protocol, self.flags)
        return self.daddr.packed + self.saddr.packed + tail

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        size = (len(data) - _ct_tail.size) // 2
        daddr, saddr = ip_address(data[:size]), ip_address(data[size : 2 * size])
        *ports, protocol, flags = _ct_tail.unpack(data[2 * size :])
        dport, sport = _ports.unpack(b"".join(ports))
        return cls(daddr, saddr, dport, sport, protocol, flags)


class CtEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the conntrack maps, 56 bytes. Times are seconds since boot; ``flags`` are enum ct bits."""

    SIZE: ClassVar = _ct_entry.size

    reserved: int = 0
    backend_id: int = 0
    packets: int = 0
    octets: int = 0
    lifetime: int = 0
    """When the entry expires."""
    flags: int = 0
    rev_nat_index: int = 0
    ifindex: int = 0
    tx_flags_seen: int = 0
    rx_flags_seen: int = 0
    source_identity: int = 0
    last_tx_report: int = 0
    last_rx_report: int = 0

    def pack(self) -> bytes:
        return _ct_entry.pack(
            *(self.reserved, self.backend_id, self.packets, self.octets, self.lifetime, self.flags),
            *(_port.pack(self.rev_nat_index), self.ifindex, self.tx_flags_seen, self.rx_flags_seen),
            *(self.source_identity, self.last_tx_report, self.last_rx_report),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        reserved, backend, packets, total, lifetime, flags, rev_nat, *rest = _ct_entry.unpack(data)
        ifindex, tx_seen, rx_seen, source, last_tx, last_rx = rest
        return cls(
            reserved=reserved,
            backend_id=backend,
            packets=packets,
            octets=total,
            lifetime=lifetime,
            flags=flags,
            rev_nat_index=_port.unpack(rev_nat)[0],
            ifindex=ifindex,
            tx_flags_seen=tx_seen,
            rx_flags_seen=rx_seen,
            source_identity=source,
            last_tx_report=last_tx,
            last_rx_report=last_rx,
        )


class FragmentPorts(msgspec.Struct, frozen=True):
    """Value of cilium_ipv4_frag_datagrams and the IPv6 map, 4 bytes: the ports of the first fragment."""

    SIZE: ClassVar = _fragment_ports.size

    sport: int
    dport: int

    def pack(self) -> bytes:
        return _ports.pack(self.sport, self.dport)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*_ports.unpack(data))


# NAT maps, and the configuration of native devices.
#
# Source: Cilium 1.16/1.17 map ABI for cilium_snat_*; hive_devices is our own (bpf/netdev/maps.h). Keys of
#         cilium_snat_* are a CtKey's bytes; their addresses and ports are those of the packet.

DEVICE_IP_MASQ: Final = 1
"""The exceptions in cilium_ipmasq_v4 and v6 apply."""
DEVICE_REMOTE_NODES: Final = 2
"""Packets from pods to other nodes are masqueraded, too."""
DEVICE_MASQUERADE_IPV4: Final = 4
"""Pods' IPv4 packets are masqueraded with the device's address."""
DEVICE_MASQUERADE_IPV6: Final = 8
"""The same for IPv6."""
DEVICE_XDP: Final = 16
"""It also has an XDP program."""
DEVICE_PROXIES: Final = 32
"""A proxy may send packets with pods' source addresses through it: look for their replies at ingress."""

_NO_IPV4, _NO_IPV6 = IPv4Address(0), IPv6Address(0)

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
"""Value sizes in bytes, per family."""


class NatEntry(msgspec.Struct, frozen=True):
    """Value of cilium_snat_v4_external (40 bytes) and cilium_snat_v6_external (56 bytes)."""

    address: IPAddress
    port: int
    created: int = 0
    """In nanoseconds of CLOCK_MONOTONIC."""
    needs_ct: bool = False
    """Whether the node itself is an end of the flow."""

    def pack(self) -> bytes:
        layout = _nat4 if self.address.version == 4 else _nat6
        return layout.pack(self.created, self.needs_ct, self.address.packed, _port.pack(self.port))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        layout = _nat4 if len(data) == NAT4_ENTRY else _nat6
        created, needs_ct, address, port = layout.unpack(data)
        return cls(ip_address(address), _port.unpack(port)[0], created, bool(needs_ct))


class DeviceConfig(msgspec.Struct, frozen=True):
    """Value of hive_devices, 64 bytes: configuration of a native device."""

    SIZE: ClassVar = _device.size

    mac: bytes
    """Zeros for a device without Ethernet headers."""
    ipv4: IPv4Address | None = None
    """Source address of masqueraded packets."""
    ipv6: IPv6Address | None = None
    native4: IPv4Network | None = None
    """The native routing CIDR: packets to it are not masqueraded."""
    native6: IPv6Network | None = None
    flags: int = 0
    """DEVICE_* flags."""
    announces: int = 0
    """Milliseconds after the agent's last heartbeat during which it answers ARP for services; 0: never."""

    @property
    def l3(self) -> bool:
        """Whether its packets have no Ethernet header."""
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


# Configuration of WireGuard: hive_encryption, which is our own. Little endian, but addresses and ports in
# network order.

ENCRYPTION_NODES: Final = 1
"""Node-to-node encryption: nodes' own packets are encrypted, too."""
ENCRYPTION_STRICT: Final = 2
"""Strict mode: unencrypted packets between addresses of the strict CIDR are dropped."""
ENCRYPTION_STRICT_NODES: Final = 4
"""Exempts packets to nodes with addresses in the strict CIDR."""

_encryption = Layout(
    "encryption_config",
    ifindex="I",
    flags="I",
    strict="4s",
    strict_mask="4s",
    node_ip="4s",
    port="2s",
    pad="2x",
    rotating="8s",
)
_rotating = struct.Struct("<II")


class EncryptionConfig(msgspec.Struct, frozen=True):
    """The one value of hive_encryption, 32 bytes: WireGuard devices; all zero without encryption."""

    SIZE: ClassVar = _encryption.size

    ifindex: int = 0
    """Index of cilium_wg0."""
    flags: int = 0
    """ENCRYPTION_* flags."""
    strict: IPv4Network | None = None
    node_ip: IPv4Address = _NO_IPV4
    port: int = 0
    """UDP port of cilium_wg0; the devices of a key rotation use the next two."""
    rotating: tuple[int, int] = (0, 0)
    """Indexes of cilium_wg1 and cilium_wg2 during a key rotation."""

    def pack(self) -> bytes:
        network, mask = bytes(4), bytes(4)
        if self.strict is not None:
            network, mask = self.strict.network_address.packed, self.strict.netmask.packed
        return _encryption.pack(
            *(self.ifindex, self.flags, network, mask, self.node_ip.packed, _port.pack(self.port)),
            _rotating.pack(*self.rotating),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ifindex, flags, network, mask, node_ip, port, rotating = _encryption.unpack(data)
        strict = IPv4Network((network, IPv4Address(mask).compressed)) if flags & ENCRYPTION_STRICT else None
        (number,), (first, second) = _port.unpack(port), _rotating.unpack(rotating)
        return cls(ifindex, flags, strict, IPv4Address(node_ip), number, (first, second))


# Maps of socket load balancing.
#
# Source: Cilium 1.17 for cilium_lb*_reverse_sk and cilium_skip_lb*; hive_sock is our own. Little endian, but
#         addresses, ports and NAT indexes in network order; the port of cilium_skip_lb6 in the host's.

SOCK_HOST_ONLY: Final = 1
"""Translate only sockets of the host's network namespace."""
SOCK_BIND_PROTECTION: Final = 2
"""Sockets of the node may not bind to a service's address and port."""
SOCK_TRUSTS_EXTERNAL_IP: Final = 4
"""Also serve externalIPs that the node does not have."""
SOCK_REJECTS: Final = 8
"""Connections to a service without backends are refused."""

_sock = Layout("sock_config", host_cookie="Q", node_port_min="H", node_port_max="H", flags="I")
_key4 = Layout("reverse_sk4_key", cookie="Q", address="4s", port="2s", pad="2x")
_key6 = Layout("reverse_sk6_key", cookie="Q", address="16s", port="2s", pad="2x", pad2="4x")
_value4 = Layout("reverse_sk4", address="4s", port="2s", rev_nat_index="2s")
_value6 = Layout("reverse_sk6", address="16s", port="2s", rev_nat_index="2s")
_skip4 = Layout("skip_lb4_key", netns_cookie="Q", address="4s", port="2s", pad="2x")
_skip6 = Layout("skip_lb6_key", netns_cookie="Q", address="16s", pad="4x", port="H", pad2="2x")


class SockConfig(msgspec.Struct, frozen=True):
    """The one value of hive_sock, 16 bytes: configuration of socket load balancing."""

    SIZE: ClassVar = _sock.size

    host_cookie: int
    """Netns cookie of the host's network namespace."""
    node_ports: tuple[int, int]
    """First and last node port."""
    flags: int = 0
    """SOCK_* flags."""

    def pack(self) -> bytes:
        return _sock.pack(self.host_cookie, *self.node_ports, self.flags)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        cookie, first, last, flags = _sock.unpack(data)
        return cls(cookie, (first, last), flags)


class ReverseSkKey(msgspec.Struct, frozen=True):
    """Key of cilium_lb4_reverse_sk, 16 bytes, or cilium_lb6_reverse_sk, 32: socket cookie and backend."""

    cookie: int
    ip: IPAddress
    port: int

    def pack(self) -> bytes:
        layout = _key4 if self.ip.version == 4 else _key6
        return layout.pack(self.cookie, self.ip.packed, self.port.to_bytes(2, "big"))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        cookie, address, port = (_key4 if len(data) == _key4.size else _key6).unpack(data)
        return cls(cookie, ip_address(address), int.from_bytes(port, "big"))


class ReverseSk(msgspec.Struct, frozen=True):
    """Value of cilium_lb4_reverse_sk, 8 bytes, or the IPv6 map, 20: the socket's original destination."""

    ip: IPAddress
    port: int
    rev_nat_index: int

    def pack(self) -> bytes:
        layout = _value4 if self.ip.version == 4 else _value6
        return layout.pack(
            self.ip.packed, self.port.to_bytes(2, "big"), self.rev_nat_index.to_bytes(2, "big")
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        address, port, index = (_value4 if len(data) == _value4.size else _value6).unpack(data)
        return cls(ip_address(address), int.from_bytes(port, "big"), int.from_bytes(index, "big"))


class SkipLbKey(msgspec.Struct, frozen=True):
    """Key of cilium_skip_lb4, 16 bytes, or cilium_skip_lb6, 32: netns cookie, address and port."""

    netns_cookie: int
    ip: IPAddress
    port: int

    def pack(self) -> bytes:
        if self.ip.version == 4:
            return _skip4.pack(self.netns_cookie, self.ip.packed, self.port.to_bytes(2, "big"))
        return _skip6.pack(self.netns_cookie, self.ip.packed, self.port)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        if len(data) == _skip4.size:
            cookie, address, port = _skip4.unpack(data)
            return cls(cookie, ip_address(address), int.from_bytes(port, "big"))
        cookie, address, number = _skip6.unpack(data)
        return cls(cookie, ip_address(address), number)


# Maps of NodePort: services for external clients.
#
# Source: bpf/nodeport/maps.h; hive_nodeport is our own. Addresses are in network order.

NODEPORT_ON: Final = 1
"""External clients are served."""
NODEPORT_DSR_TCP: Final = 2
"""DSR for TCP: remote backends reply directly to the client."""
NODEPORT_DSR_OTHER: Final = 4
"""DSR for other protocols."""
NODEPORT_MAGLEV: Final = 8
"""Backends are selected by Maglev tables."""
NODEPORT_DSR_CHOSEN: Final = 32
"""Each service selects SNAT or DSR."""
NODEPORT_XDP: Final = 16
"""XDP programs may have handled packets before."""

_nodeport = Layout("nodeport_config", ipv4="4s", flags="I", ipv6="16s", seed4="I", seed6="I")
NEIGHBOUR: Final = Layout("nodeport_neighbour", mac="6s", pad="2x").size
"""Value size of cilium_nodeport_neigh4 and 6 in bytes: the source MAC of a client's packets."""


class NodePortConfig(msgspec.Struct, frozen=True):
    """The one value of hive_nodeport, 32 bytes; all zero if no external clients are served."""

    SIZE: ClassVar = _nodeport.size

    flags: int = 0
    """NODEPORT_* flags."""
    ipv4: IPv4Address = IPv4Address(0)
    """Source address of packets to remote backends."""
    ipv6: IPv6Address = IPv6Address(0)
    seeds: tuple[int, int] = (0, 0)
    """Hash seeds for Maglev, per family."""

    def pack(self) -> bytes:
        return _nodeport.pack(self.ipv4.packed, self.flags, self.ipv6.packed, *self.seeds)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ipv4, flags, ipv6, *seeds = _nodeport.unpack(data)
        return cls(flags, IPv4Address(ipv4), IPv6Address(ipv6), (seeds[0], seeds[1]))


# Entries of cilium_metrics: numbers of forwarded and dropped packets, by reason and source line in the C.
#
# Source: Cilium 1.16/1.17 map ABI. Little endian. struct.error on data of another size.

METRIC_INGRESS: Final = 1
METRIC_EGRESS: Final = 2
METRIC_SERVICE: Final = 3

_metrics_key = Layout("metrics_key", reason="B", direction="B", line="H", file="B", reserved="3x")
_metrics_value = Layout("metrics_value", count="Q", bytes="Q")


class MetricsKey(msgspec.Struct, frozen=True):
    """Key of cilium_metrics, 8 bytes: reason, direction, and source line of the datapath."""

    SIZE: ClassVar = _metrics_key.size

    reason: int
    direction: int
    line: int = 0
    file: int = 0

    def pack(self) -> bytes:
        return _metrics_key.pack(self.reason, self.direction, self.line, self.file)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        reason, direction, line, file = _metrics_key.unpack(data)
        return cls(reason, direction & 3, line, file)


class MetricsValue(msgspec.Struct, frozen=True):
    """Value of cilium_metrics: 16 bytes for each possible CPU."""

    SIZE: ClassVar = _metrics_value.size

    packets: int
    octets: int

    def pack(self) -> bytes:
        """Encode one CPU's value."""
        return _metrics_value.pack(self.packets, self.octets)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode the sum of all CPUs' values."""
        values = list(_metrics_value.iter_unpack(data))
        return cls(sum(packets for packets, _ in values), sum(total for _, total in values))
