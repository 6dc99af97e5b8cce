"""Packets as the monitor of ``cilium-dbg`` prints them: a line of the connection, or every field of a header.

In: the bytes of an event behind its header, from Ethernet on. Out: ``10.0.1.5:80 -> 10.0.2.7:4000 tcp SYN``,
lines of fields, or the parts of a JSON summary.

Source: Cilium 1.17, pkg/monitor/dissect.go; gopacket's decoders and LayerString().
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from cells.hubble.parser.packet import (
    ICMPV4_CODES,
    ICMPV4_TYPES,
    ICMPV6_CODES,
    ICMPV6_TYPES,
    icmp_text,
    ip_text,
)
from hive.dbg.go_text import numbered

_ETHERNET_TYPES: Final = numbered(
    "0 LLC 2048 IPv4 2054 ARP 8192 CiscoDiscovery 25944 TransparentEthernetBridging 33024 Dot1Q "
    "34525 IPv6 34827 PPP 34887 MPLSUnicast 34888 MPLSMulticast 34915 PPPoEDiscovery "
    "34916 PPPoESession 34958 EAPOL 34984 Dot1Q 35006 ERSPAN 35020 LinkLayerDiscovery "
    "36864 EthernetCTP"
)
_PROTOCOLS: Final = numbered(
    "0 IPv6HopByHop 1 ICMPv4 2 IGMP 4 IPv4 6 TCP 17 UDP 27 RUDP 41 IPv6 43 IPv6Routing "
    "44 IPv6Fragment 47 GRE 50 ESP 51 AH 58 ICMPv6 59 NoNextHeader 60 IPv6Destination 89 OSPF 94 IPv4 "
    "97 EtherIP 112 VRRP 132 SCTP 136 UDPLite 137 MPLS"
)
_LAYERS: Final = _PROTOCOLS | {50: "IPSecESP", 51: "IPSecAH"}
"""Layers that follow IP, where they are called otherwise than the protocol."""
_PORT_NAMES: Final = numbered(
    "20 ftp-data 21 ftp 22 ssh 23 telnet 25 smtp 53 domain 67 bootps 68 bootpc 69 tftp 80 http "
    "88 kerberos 110 pop3 111 sunrpc 123 ntp 143 imap 161 snmp 179 bgp 389 ldap 443 https "
    "445 microsoft-ds 514 shell 546 dhcpv6-client 547 dhcpv6-server 587 submission 636 ldaps "
    "853 domain-s 993 imaps 995 pop3s 1433 ms-sql-s 2049 nfs 2379 etcd-client 2380 etcd-server "
    "3306 mysql 3389 ms-wbt-server 4240 vrml-multi-use 4789 vxlan 5432 postgresql 5672 amqp "
    "6081 geneve 6379 redis 6443 sun-sr-https 8080 http-alt 8443 pcsync-https 8472 otv 9090 websm "
    "9092 XmlIpcRegSvc 9100 pdl-datastream 11211 memcache 27017 mongodb 40000 safetynetp"
)
"""IANA's names of ports that pods often use; gopacket has all of them."""
_UDP_NAMES: Final = _PORT_NAMES | {514: "syslog"}
_PAYLOADS: Final = {
    "tcp": numbered("53 DNS 443 TLS 502 ModbusTCP 636 TLS 989 TLS 990 TLS 992 TLS 993 TLS 994 TLS 995 TLS"),
    "udp": numbered(
        "53 DNS 67 DHCPv4 68 DHCPv4 123 NTP 546 DHCPv6 547 DHCPv6 623 RMCP 1812 RADIUS 1813 RADIUS"
        " 2152 GTPv1U 3784 BFD 4789 VXLAN 5060 SIP 6081 Geneve 6343 SFlow"
    ),
}
"""Layers that follow a port."""
_OPTIONS: Final = numbered(
    "0 EndList 1 NOP 2 MSS 3 WindowScale 4 SACKPermitted 5 SACK 6 Echo 7 EchoReply 8 Timestamps "
    "14 AltChecksum 15 AltChecksumData 28 UserTimeout"
)
_TCP_FLAGS: Final = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR", "NS")
_IPV4_FLAGS: Final = {4: "Evil", 2: "DF", 1: "MF"}


class _DecodeError(ValueError):
    """A header cannot be decoded; those before it are printed all the same."""


class _Layer(NamedTuple):
    """A decoded header: its name, and the fields behind its contents and payload."""

    name: str
    contents: bytes
    payload: bytes
    fields: dict[str, object]

    def text(self) -> str:
        """As LayerString() prints it."""
        fields = {"Contents": self.contents, "Payload": self.payload, **self.fields}
        return f"{self.name}\t{{{' '.join(f'{name}={_text(value)}' for name, value in fields.items())}}}"


class Dissected(msgspec.Struct):
    """The headers of a packet that could be decoded, in their order."""

    layers: list[_Layer] = []
    truncated: bool = False
    error: str = ""

    def fields_of(self, *names: str) -> dict[str, Any] | None:
        """The fields of the last layer with one of these names."""
        return next((one.fields for one in reversed(self.layers) if one.name in names), None)


def _text(value: object) -> str:
    """A field as LayerString() prints it: of more than four elements, only how many there are."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes | list):
        if len(value) > 4:
            return f"[..{len(value)}..]"
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def dissect(data: bytes) -> Dissected:
    """The headers of a packet."""
    found = Dissected(layers=[])
    name = "Ethernet"
    while name and data:
        decode = _DECODERS.get(name)
        if decode is None:
            found.error = f"No decoder for layer type {name}"
            break
        try:
            layer, name = decode(data, found)
        except _DecodeError as error:
            found.error = str(error)
            break
        found.layers.append(layer)
        data = layer.payload
    return found


def connection_summary(data: bytes) -> str:
    """The ends of a packet and its protocol: ``10.0.1.5:80 -> 10.0.2.7:4000 tcp SYN, ACK``."""
    found = dissect(data)
    network = found.fields_of("IPv4", "IPv6")
    ends = [str(network[name]) for name in ("SrcIP", "DstIP")] if network is not None else ["<nil>", "<nil>"]
    if (icmp := found.fields_of("ICMPv4", "ICMPv6")) is not None:
        return f"{ends[0]} -> {ends[1]} {icmp['TypeCode']}"
    for name in ("TCP", "UDP", "SCTP"):
        if (header := found.fields_of(name)) is not None:
            ports = [header[field].partition("(")[0] for field in ("SrcPort", "DstPort")]
            source, destination = (_joined(ip, port) for ip, port in zip(ends, ports, strict=True))
            flags = [flag for flag in ("SYN", "ACK", "RST", "FIN") if header.get(flag)]
            return f"{source} -> {destination} {name.lower()}" + (
                f" {', '.join(flags)}" if name == "TCP" else ""
            )
    if network is not None:
        return f"{ends[0]} -> {ends[1]}"
    if (ethernet := found.fields_of("Ethernet")) is not None:
        return f"{ethernet['SrcMAC']} -> {ethernet['DstMAC']} {ethernet['EthernetType']}"
    return "[unknown]"


def _joined(ip: str, port: str) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def dissected_lines(data: bytes) -> Iterator[str]:
    """A line for each header, and what could not be decoded."""
    found = dissect(data)
    yield from (layer.text() for layer in found.layers)
    if found.truncated:
        yield "  Packet has been truncated"
    if found.error:
        yield f"  Failed to decode layer: {found.error}"


def summary(data: bytes) -> dict[str, Any]:
    """The headers and ends of a packet, as the monitor's JSON has them."""
    found = dissect(data)
    texts = {layer.name.lower(): layer.text() for layer in found.layers}
    order = ("ethernet", "ipv4", "ipv6", "tcp", "udp", "sctp", "icmpv4", "icmpv6")
    parts: dict[str, Any] = {name: texts[name] for name in order if name in texts}
    for level, names, fields in (
        ("l2", ("Ethernet",), ("SrcMAC", "DstMAC")),
        ("l3", ("IPv4", "IPv6"), ("SrcIP", "DstIP")),
        ("l4", ("TCP", "UDP", "SCTP"), ("SrcPort", "DstPort")),
    ):
        if (header := found.fields_of(*names)) is not None:
            source, destination = (str(header[field]).partition("(")[0] for field in fields)
            parts[level] = {"src": source, "dst": destination}
    return parts


def hex_dump(data: bytes) -> Iterator[str]:
    """Sixteen bytes a line, with their offset and the characters that they are."""
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        halves = (row[:8].hex(" "), row[8:].hex(" "))
        shown = "".join(chr(byte) if 32 <= byte <= 126 else "." for byte in row)
        yield f"{start:08x}  {halves[0]:23}  {halves[1]:23}  |{shown}|"


# One decoder for each header. Each returns the layer and the name of the next one.


def _needs(data: bytes, length: int, found: Dissected, text: str) -> None:
    if len(data) < length:
        found.truncated = True
        raise _DecodeError(text)


def _ethernet(data: bytes, _: Dissected) -> tuple[_Layer, str]:
    if len(data) < 14:
        raise _DecodeError("Ethernet packet too small")
    (kind,) = struct.unpack_from(">H", data, 12)
    payload, length = data[14:], 0
    if kind < 0x0600:
        payload, length, kind = payload[:kind], kind, 0
    name = _ETHERNET_TYPES.get(kind, "UnknownEthernetType")
    fields = {
        "SrcMAC": data[6:12].hex(":"),
        "DstMAC": data[:6].hex(":"),
        "EthernetType": name,
        "Length": length,
    }
    return _Layer("Ethernet", data[:14], payload, fields), name


def _ipv4(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 20, found, f"Invalid ip4 header. Length {len(data)} less than 20")
    first, tos, total, number, fragment, ttl, protocol, checksum, source, destination = struct.unpack_from(
        ">BBHHHBBH4s4s", data
    )
    total = total or len(data)
    words, start = first & 0xF, (first & 0xF) * 4
    if total < 20:
        raise _DecodeError(f"Invalid (too small) IP length ({total} < 20)")
    if words < 5:
        raise _DecodeError(f"Invalid (too small) IP header length ({words} < 5)")
    if start > total:
        raise _DecodeError(f"Invalid IP header length > IP length ({words} > {total})")
    if total > len(data):
        found.truncated = True
        if start > len(data):
            raise _DecodeError("Not all IP header bytes available")
    options, padding = _ipv4_options(data[20:start], found)
    flags = "|".join(name for bit, name in _IPV4_FLAGS.items() if fragment >> 13 & bit)
    fields = {
        "Version": first >> 4,
        "IHL": words,
        "TOS": tos,
        "Length": total,
        "Id": number,
        "Flags": flags,
        "FragOffset": fragment & 0x1FFF,
        "TTL": ttl,
        "Protocol": _protocol(protocol),
        "Checksum": checksum,
        "SrcIP": ip_text(source),
        "DstIP": ip_text(destination),
        "Options": options,
        "Padding": padding,
    }
    following = "Fragment" if fragment & 0x3FFF else _layer_after(protocol)
    return _Layer("IPv4", data[:start], data[start:total], fields), following


def _ipv4_options(data: bytes, found: Dissected) -> tuple[list[str], bytes]:
    options: list[str] = []
    while data:
        kind = data[0]
        if kind in {0, 1}:
            options.append(f"IPv4Option({kind}:[])")
            if kind == 0:
                return options, data[1:]
            data = data[1:]
            continue
        _needs(data, 2, found, f"Invalid ip4 option length. Length {len(data)} less than 2")
        length = data[1]
        text = f"IP option length exceeds remaining IP header size, option type {kind} length {length}"
        _needs(data, length, found, text)
        if length <= 2:
            raise _DecodeError(f"Invalid IP option type {kind} length {length}. Must be greater than 2")
        options.append(f"IPv4Option({kind}:[{' '.join(map(str, data[2:length]))}])")
        data = data[length:]
    return options, b""


def _protocol(number: int) -> str:
    return _PROTOCOLS.get(number, "UnknownIPProtocol")


def _layer_after(number: int) -> str:
    return _LAYERS.get(number, "UnknownIPProtocol")


def _ipv6(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 40, found, f"Invalid ip6 header. Length {len(data)} less than 40")
    word, length, protocol, hops, source, destination = struct.unpack_from(">IHBB16s16s", data)
    payload, options, following = data[40:], "nil", protocol
    if protocol == 0:
        _needs(payload, 2, found, f"Invalid ip6-extension header. Length {len(payload)} less than 2")
        size = payload[1] * 8 + 8
        text = f"Invalid ip6-extension header. Length {len(payload)} less than specified length {size}"
        _needs(payload, size, found, text)
        following, options = payload[0], f"{{NextHeader={_protocol(payload[0])} HeaderLength={payload[1]}}}"
        payload = payload[size:]
    if not length:
        name = _protocol(protocol)
        raise _DecodeError(f"IPv6 length 0, but next header is {name}, not HopByHop")
    found.truncated |= length > len(payload)
    fields = {
        "Version": word >> 28,
        "TrafficClass": word >> 20 & 0xFF,
        "FlowLabel": word & 0xFFFFF,
        "Length": length,
        "NextHeader": _protocol(protocol),
        "HopLimit": hops,
        "SrcIP": ip_text(source),
        "DstIP": ip_text(destination),
        "HopByHop": options,
    }
    return _Layer("IPv6", data[:40], payload[:length], fields), _layer_after(following)


def _port(number: int, names: dict[int, str] = _PORT_NAMES) -> str:
    return f"{number}({names[number]})" if number in names else str(number)


def _tcp(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 20, found, f"Invalid TCP header. Length {len(data)} less than 20")
    source, destination, number, acknowledged, offset, bits, window, checksum, urgent = struct.unpack_from(
        ">HHIIBBHHH", data
    )
    start = (offset >> 4) * 4
    if start < 20:
        raise _DecodeError(f"Invalid TCP data offset {offset >> 4} < 5")
    _needs(data, start, found, "TCP data offset greater than packet length")
    flags = (offset & 1) << 8 | bits
    options, padding = _tcp_options(data[20:start], found)
    fields = {
        "SrcPort": _port(source),
        "DstPort": _port(destination),
        "Seq": number,
        "Ack": acknowledged,
        "DataOffset": offset >> 4,
        **{name: bool(flags >> bit & 1) for bit, name in enumerate(_TCP_FLAGS)},
        "Window": window,
        "Checksum": checksum,
        "Urgent": urgent,
        "Options": options,
        "Padding": padding,
    }
    return _Layer("TCP", data[:start], data[start:], fields), _payload("tcp", source, destination)


def _tcp_options(data: bytes, found: Dissected) -> tuple[list[str], bytes]:
    options: list[str] = []
    while data:
        kind = data[0]
        name = _OPTIONS.get(kind, f"Unknown({kind})")
        if kind in {0, 1}:
            options.append(f"TCPOption({name}:)")
            if kind == 0:
                return options, data[1:]
            data = data[1:]
            continue
        _needs(data, 2, found, f"Invalid TCP option length. Length {len(data)} less than 2")
        length = data[1]
        if length < 2:
            raise _DecodeError(f"Invalid TCP option length {length} < 2")
        _needs(data, length, found, f"Invalid TCP option length {length} exceeds remaining {len(data)} bytes")
        options.append(_tcp_option(kind, name, data[2:length]))
        data = data[length:]
    return options, b""


def _tcp_option(kind: int, name: str, content: bytes) -> str:
    shown = f" 0x{content.hex()}" if content else ""
    if kind == 2 and len(content) >= 2:
        return f"TCPOption({name}:{struct.unpack_from('>H', content)[0]}{shown})"
    if kind == 8 and len(content) == 8:
        value, echoed = struct.unpack(">II", content)
        return f"TCPOption({name}:{value}/{echoed}{shown})"
    return f"TCPOption({name}:{shown})"


def _payload(protocol: str, source: int, destination: int) -> str:
    known = _PAYLOADS[protocol]
    return known.get(destination) or known.get(source) or "Payload"


def _udp(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 8, found, f"Invalid UDP header. Length {len(data)} less than 8")
    source, destination, length, checksum = struct.unpack_from(">HHHH", data)
    if 0 < length < 8:
        raise _DecodeError(f"UDP packet too small: {length} bytes")
    found.truncated |= length > len(data)
    payload = data[8:length] if length else data[8:]
    ports = {"SrcPort": _port(source, _UDP_NAMES), "DstPort": _port(destination, _UDP_NAMES)}
    layer = _Layer("UDP", data[:8], payload, {**ports, "Length": length, "Checksum": checksum})
    return layer, _payload("udp", source, destination)


def _sctp(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 12, found, f"Invalid SCTP common header length {len(data)}")
    source, destination, tag, checksum = struct.unpack_from(">HHII", data)
    fields = {
        "SrcPort": str(source),
        "DstPort": str(destination),
        "VerificationTag": tag,
        "Checksum": checksum,
    }
    return _Layer("SCTP", data[:12], data[12:], fields), "SCTPUnknownChunkType"


def _icmpv4(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 8, found, "ICMP layer less then 8 bytes for ICMPv4 packet")
    kind, code, checksum, number, sequence = struct.unpack_from(">BBHHH", data)
    fields = {
        "TypeCode": icmp_text(kind, code, ICMPV4_TYPES, ICMPV4_CODES),
        "Checksum": checksum,
        "Id": number,
        "Seq": sequence,
    }
    return _Layer("ICMPv4", data[:8], data[8:], fields), "Payload"


_ICMPV6_LAYERS: Final = numbered(
    "128 ICMPv6Echo 129 ICMPv6Echo 133 ICMPv6RouterSolicitation 134 ICMPv6RouterAdvertisement "
    "135 ICMPv6NeighborSolicitation 136 ICMPv6NeighborAdvertisement 137 ICMPv6Redirect"
)


def _icmpv6(data: bytes, found: Dissected) -> tuple[_Layer, str]:
    _needs(data, 4, found, "ICMP layer less then 4 bytes for ICMPv6 packet")
    kind, code, checksum = struct.unpack_from(">BBH", data)
    fields = {"TypeCode": icmp_text(kind, code, ICMPV6_TYPES, ICMPV6_CODES), "Checksum": checksum}
    return _Layer("ICMPv6", data[:4], data[4:], fields), _ICMPV6_LAYERS.get(kind, "Payload")


_DECODERS: Final[dict[str, Callable[[bytes, Dissected], tuple[_Layer, str]]]] = {
    "Ethernet": _ethernet,
    "IPv4": _ipv4,
    "IPv6": _ipv6,
    "TCP": _tcp,
    "UDP": _udp,
    "SCTP": _sctp,
    "ICMPv4": _icmpv4,
    "ICMPv6": _icmpv6,
}
