"""What is inside the conntrack and fragment maps.

For:    every cell that reads or writes them. Needs: nothing. Gives: CtKey, CtEntry, FragmentPorts.
Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses, ports and NAT indexes in network order.
"""

import struct
from ipaddress import ip_address
from typing import Final, Self

import msgspec

from cells.maps.layouts import IPAddress

CT_OUT: Final = 0
CT_IN: Final = 1
CT_RELATED: Final = 2
CT_SERVICE: Final = 4

_port = struct.Struct(">H")
_ct_tail = struct.Struct(">HHBB")
_ct_entry = struct.Struct("<QQQQIH2sHBBIII")
_ports = struct.Struct(">HH")


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
        tail = _ct_tail.pack(self.dport, self.sport, self.protocol, self.flags)
        return self.daddr.packed + self.saddr.packed + tail

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        size = (len(data) - _ct_tail.size) // 2
        daddr, saddr = ip_address(data[:size]), ip_address(data[size : 2 * size])
        return cls(daddr, saddr, *_ct_tail.unpack(data[2 * size :]))


class CtEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the conntrack maps, 56 bytes. Times are seconds since boot; ``flags`` are enum ct bits."""

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

    sport: int
    dport: int

    def pack(self) -> bytes:
        return _ports.pack(self.sport, self.dport)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*_ports.unpack(data))
