"""What is inside the conntrack and fragment maps.

For:    every cell that reads or writes them. Needs: nothing. Gives: CtKey, CtEntry, FragmentPorts.
Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses, ports and NAT indexes in network order.
"""

import struct
from ipaddress import ip_address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import IPAddress, Layout

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
"""Bytes of the keys of each family."""


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
    """Value of cilium_ipv4_frag_datagrams and its IPv6 twin, 4 bytes: what the first fragment said."""

    SIZE: ClassVar = _fragment_ports.size

    sport: int
    dport: int

    def pack(self) -> bytes:
        return _ports.pack(self.sport, self.dport)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*_ports.unpack(data))
