"""Formats events as lines of text, with source, destination and reason; dissects packets.

``hive monitor`` uses it. Source of the texts: Cilium 1.17, pkg/monitor/api.
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Protocol

import msgspec

from cells.observe.events.access_log import NAMES, LookupRecord, Party, RequestRecord
from cells.observe.events.records import (
    AgentNotification,
    Drop,
    Event,
    Lost,
    Raw,
    Trace,
    TraceSock,
    Verdict,
)

# Dissection of packets: addresses, ports, flags.

_IPV4, _IPV6, _ARP = 0x0800, 0x86DD, 0x0806
_TCP, _UDP, _ICMP, _ICMPV6, _SCTP = 6, 17, 1, 58, 132
_PROTOCOLS: Final = {_TCP: "tcp", _UDP: "udp", _ICMP: "icmp", _ICMPV6: "icmpv6", _SCTP: "sctp"}
_FLAGS: Final = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR")  # RFC 9293, from the lowest bit


class Packet(msgspec.Struct, frozen=True):
    """The headers of a packet, which may be truncated anywhere."""

    source_mac: str
    destination_mac: str
    source: IPv4Address | IPv6Address | None = None
    """None if it is not an IP packet."""
    destination: IPv4Address | IPv6Address | None = None
    protocol: str = ""
    """``tcp``, ``udp``, ``icmp``, ``icmpv6``, ``sctp``, ``protocol 47``; ``arp``; ``ethertype 0x88cc``."""
    ports: tuple[int, int] | None = None
    """Source and destination; None without ports, as in a later fragment."""
    detail: str = ""
    """TCP flags, or ICMP type and code."""


def dissect(packet: bytes) -> Packet | None:
    """Parse a packet from its Ethernet header on; None if that is incomplete."""
    if len(packet) < 14:
        return None
    source_mac, destination_mac = packet[6:12].hex(":"), packet[:6].hex(":")
    (protocol,) = struct.unpack_from(">H", packet, 12)
    body = packet[14:]
    source: IPv4Address | IPv6Address
    destination: IPv4Address | IPv6Address
    if protocol == _IPV4 and len(body) >= 20:
        source, destination = IPv4Address(body[12:16]), IPv4Address(body[16:20])
        later = struct.unpack_from(">H", body, 6)[0] & 0x1FFF
        number, body = body[9], b"" if later else body[(body[0] & 0xF) * 4 :]
    elif protocol == _IPV6 and len(body) >= 40:
        source, destination = IPv6Address(body[8:24]), IPv6Address(body[24:40])
        number, body = body[6], body[40:]
    else:
        name = "arp" if protocol == _ARP else f"ethertype 0x{protocol:04x}"
        return Packet(source_mac, destination_mac, protocol=name)
    name = _PROTOCOLS.get(number, f"protocol {number}")
    ports, detail = _transport(number, body)
    return Packet(source_mac, destination_mac, source, destination, name, ports, detail)


def _transport(protocol: int, body: bytes) -> tuple[tuple[int, int] | None, str]:
    if protocol in {_TCP, _UDP, _SCTP} and len(body) >= 4:
        bits = body[13] if protocol == _TCP and len(body) >= 14 else 0
        flags = (flag for bit, flag in enumerate(_FLAGS) if bits & 1 << bit)
        return struct.unpack_from(">HH", body), ", ".join(flags)
    if protocol in {_ICMP, _ICMPV6} and len(body) >= 2:
        return None, f"type {body[0]} code {body[1]}"
    return None, ""


def protocol_text(packet: bytes) -> str:
    """Return protocol and flags, such as ``tcp SYN, ACK``; of a truncated packet, what it contains."""
    found = dissect(packet)
    if found is None:
        return "no packet" if not packet else f"[{packet.hex()}]"
    return f"{found.protocol} {found.detail}".rstrip()


# Texts of the datapath's numbers: drop reasons, observation points, match types.
#
# Source: Cilium 1.17, pkg/monitor/api (the numbers and their texts are public); bpf/lib/reasons.h has ours.

FORWARD_REASONS: Final = {
    0: "Success",
    2: "Invalid packet",
    3: "Interface",
    4: "Interface Decrypted",
    5: "LB, sock cgroup: No backend slot entry found",
    6: "LB, sock cgroup: No backend entry found",
    7: "LB, sock cgroup: Reverse entry update failed",
    8: "LB, sock cgroup: Reverse entry stale",
    9: "Fragmented packet",
    10: "Fragmented packet entry update failed",
    11: "Missed tail call to custom program",
}
"""Reasons below 128, which count packets that are not dropped."""

DROP_REASONS: Final = {
    130: "Invalid source mac",
    131: "Invalid destination mac",
    132: "Invalid source ip",
    133: "Policy denied",
    134: "Invalid packet",
    135: "CT: Truncated or invalid header",
    136: "Fragmentation needed",
    137: "CT: Unknown L4 protocol",
    138: "CT: Can't create entry from packet",
    139: "Unsupported L3 protocol",
    140: "Missed tail call",
    141: "Error writing to packet",
    142: "Unknown L4 protocol",
    143: "Unknown ICMPv4 code",
    144: "Unknown ICMPv4 type",
    145: "Unknown ICMPv6 code",
    146: "Unknown ICMPv6 type",
    147: "Error retrieving tunnel key",
    148: "Error retrieving tunnel options",
    149: "Invalid Geneve option",
    150: "Unknown L3 target address",
    151: "Stale or unroutable IP",
    152: "No matching local container found",
    153: "Error while correcting L3 checksum",
    154: "Error while correcting L4 checksum",
    155: "CT: Map insertion failed",
    156: "Invalid IPv6 extension header",
    157: "IP fragmentation not supported",
    158: "Service backend not found",
    159: "Unsupported protocol for service",
    160: "No tunnel/encapsulation endpoint (datapath BUG!)",
    161: "NAT 46/64 not enabled",
    162: "Reached EDT rate-limiting drop horizon",
    163: "Unknown connection tracking state",
    164: "Local host is unreachable",
    165: "No configuration available to perform policy decision",
    166: "Unsupported L2 protocol",
    167: "No mapping for NAT masquerade",
    168: "Unsupported protocol for NAT masquerade",
    169: "FIB lookup failed",
    170: "Encapsulation traffic is prohibited",
    171: "Invalid identity",
    172: "Unknown sender",
    173: "NAT not needed",
    174: "Is a ClusterIP",
    175: "First logical datagram fragment not found",
    176: "Forbidden ICMPv6 message",
    177: "Denied by LB src range check",
    178: "Socket lookup failed",
    179: "Socket assign failed",
    180: "Proxy redirection not supported for protocol",
    181: "Policy denied by denylist",
    182: "VLAN traffic disallowed by VLAN filter",
    183: "Incorrect VNI from VTEP",
    184: "Failed to update or lookup TC buffer",
    185: "No SID was found for the IP address",
    186: "SRv6 state was removed during tail call",
    187: "L3 translation from IPv4 to IPv6 failed (NAT46)",
    188: "L3 translation from IPv6 to IPv4 failed (NAT64)",
    189: "Authentication required",
    190: "No conntrack map found",
    191: "No nat map found",
    192: "Invalid ClusterID",
    193: "Unsupported packet protocol for DSR encapsulation",
    194: "No egress gateway found",
    195: "Traffic is unencrypted",
    196: "TTL exceeded",
    197: "No node ID found",
    198: "Rate limited",
    199: "IGMP handled",
    200: "IGMP subscribed",
    201: "Multicast handled",
    202: "Host datapath not ready",
    203: "Endpoint policy program not available",
    204: "No Egress IP configured",
}
"""Reasons of drops, from 130 on."""

OBSERVATION_POINTS: Final = {
    0: "to-endpoint",
    1: "to-proxy",
    2: "to-host",
    3: "to-stack",
    4: "to-overlay",
    5: "from-endpoint",
    6: "from-proxy",
    7: "from-host",
    8: "from-stack",
    9: "from-overlay",
    10: "from-network",
    11: "to-network",
}
"""Observation points: the subtype of a trace event."""

TRACE_REASONS: Final = {0: "new", 1: "established", 2: "reply", 3: "related", 5: "unknown"}
"""The conntrack state of a trace event."""

MATCH_TYPES: Final = {
    0: "none",
    1: "L3-Only",
    2: "L3-L4",
    3: "L4-Only",
    4: "all",
    5: "L3-Proto",
    6: "Proto-Only",
}
"""The type of the policy entry in a policy verdict."""


def reason_name(reason: int) -> str:
    """Return the text of a reason in an event or in cilium_metrics; of an unknown one its number."""
    return DROP_REASONS.get(reason) or FORWARD_REASONS.get(reason) or f"{reason}, 0"


SOCKET_POINTS: Final = {1: "pre-xlate-fwd", 2: "post-xlate-fwd", 3: "pre-xlate-rev", 4: "post-xlate-rev"}
"""Observation points of socket events."""

SOCKET_PROTOCOLS: Final = {1: "tcp", 2: "udp"}


NOTIFICATIONS: Final = {
    2: "Cilium agent started",
    3: "Endpoint regenerated",
    4: "Failed endpoint regeneration",
    5: "Policy updated",
    6: "Policy deleted",
    7: "Endpoint created",
    8: "Endpoint deleted",
    9: "IPCache entry upserted",
    10: "IPCache entry deleted",
    11: "Service upserted",
    12: "Service deleted",
}
"""Types of the agent's notifications, with the texts of Cilium's monitor."""


class EventNames(Protocol):
    """Resolves numbers in events to names; empty if unknown."""

    def endpoint(self, number: int, /) -> str:
        """Return ``namespace/name`` of an endpoint's pod."""
        ...

    def identity(self, number: int, /) -> str:
        """Return the labels of an identity."""
        ...

    def address(self, address: str, /) -> str:
        """Return the pod, service or node that has the address."""
        ...


class _NoNames:
    def endpoint(self, _number: int, /) -> str:
        return ""

    def identity(self, _number: int, /) -> str:
        return ""

    def address(self, _address: str, /) -> str:
        return ""


NUMBERS: EventNames = _NoNames()
"""Resolves nothing: events are shown with numbers."""


def event_text(event: Event, names: EventNames = NUMBERS) -> str:
    """Format an event as one line, without a newline."""
    match event:
        case Drop():
            return _drop_text(event, names)
        case Trace():
            return _trace_text(event, names)
        case Verdict():
            return _verdict_text(event, names)
        case TraceSock():
            return _trace_sock_text(event, names)
        case RequestRecord() | LookupRecord():
            return _l7_text(event, names)
        case AgentNotification() | Lost() | Raw():
            return _other_text(event)


def notification_name(notification: AgentNotification) -> str:
    """Return the type of a notification; its number if unknown."""
    return NOTIFICATIONS.get(notification.kind, str(notification.kind))


def _other_text(event: AgentNotification | Lost | Raw) -> str:
    if isinstance(event, AgentNotification):
        return f"agent, {notification_name(event)}: {event.text}"
    if isinstance(event, Raw):
        return f"unknown event of {len(event.data)} bytes: {event.data.hex()}"
    slow = ": the client reads too slowly" if event.cpu is None else f" on CPU {event.cpu}"
    return f"lost {event.count} events{slow}"


def _trace_sock_text(event: TraceSock, names: EventNames) -> str:
    point = SOCKET_POINTS.get(event.point, "unknown")
    protocol = SOCKET_PROTOCOLS.get(event.protocol, "unknown")
    end = _peer_text(str(event.address), event.port, 0, 0, names)
    return f"socket, {point}: {end} {protocol}, cgroup {event.cgroup}, cookie {event.cookie}"


def _drop_text(drop: Drop, names: EventNames) -> str:
    reason = reason_name(drop.reason)
    if drop.ext_error:
        reason = f"{reason}, {drop.ext_error}"
    flow = _flow_of(drop, names)
    place = f", file {drop.file} line {drop.line}" if drop.line else ""
    at = f", at {_endpoint(drop.source, names)}" if drop.source else ""
    return f"drop, {reason}: {flow}{at}, ifindex {drop.ifindex}{place}, flow {drop.hash:#x}"


def _trace_text(trace: Trace, names: EventNames) -> str:
    point = OBSERVATION_POINTS.get(trace.point, f"point {trace.point}")
    state = TRACE_REASONS.get(trace.reason, str(trace.reason))
    flow = _flow_of(trace, names)
    encrypted = ", encrypted" if trace.encrypted else ""
    before = "" if trace.original_ip.is_unspecified else f", source was {trace.original_ip}"
    where = f", ifindex {trace.ifindex}" if trace.ifindex else ""
    return f"trace, {point}: {flow}, {state}{encrypted}{before}{where}, flow {trace.hash:#x}"


def _verdict_text(verdict: Verdict, names: EventNames) -> str:
    if verdict.verdict < 0:
        action = f"denied ({reason_name(-verdict.verdict)})"
        if verdict.audited:
            action = f"allowed by audit mode, else {action}"
    else:
        action = f"redirected to the proxy at port {verdict.verdict}" if verdict.verdict else "allowed"
    own, peer = (verdict.source, 0), (0, verdict.remote_identity)
    way, ends = ("egress", (own, peer)) if verdict.egress else ("ingress", (peer, own))
    match = MATCH_TYPES.get(verdict.match, str(verdict.match))
    flow = _flow(verdict.packet, *ends, names)
    return f"verdict, {way} of {_endpoint(verdict.source, names)} {action}: {flow}, match {match}"


def _l7_text(record: RequestRecord | LookupRecord, names: EventNames) -> str:
    kind = "response" if record.answer else "request"
    sender, receiver = record.source, record.destination
    if isinstance(record, RequestRecord) and record.answer:
        sender, receiver = receiver, sender  # the client is the source in both directions
    ends = f"from {_party(sender, names)} to {_party(receiver, names)}"
    if isinstance(record, RequestRecord):
        code = f" => {record.code}" if record.code else ""
        return f"http {kind}, {record.verdict}: {ends} {record.method} {record.url}{code}"
    query_type = NAMES.get(record.type, f"TYPE{record.type}")
    text = f"dns {kind}, {record.verdict}: {ends} {record.query} {query_type}"
    if record.answer:
        text += f" => {','.join(record.addresses) or f'no address (RCODE {record.code})'}, TTL {record.ttl}"
        text += f", CNAMEs {','.join(record.aliases)}" if record.aliases else ""
    return text


def _flow_of(event: Drop | Trace, names: EventNames) -> str:
    sender = 0 if event.source == event.destination else event.source  # reported by the receiver's program
    source, destination = (sender, event.source_identity), (event.destination, event.destination_identity)
    return _flow(event.packet, source, destination, names)


def _flow(packet: bytes, source: tuple[int, int], destination: tuple[int, int], names: EventNames) -> str:
    """Format both ends of a packet, with endpoints and identities (0 if unknown), and its protocol."""
    found = dissect(packet)
    ips = ("", "") if found is None else (found.source, found.destination)
    ports = (found and found.ports) or (None, None)
    sender, receiver = (
        _peer_text(str(ip or ""), port, *end, names)
        for ip, port, end in zip(ips, ports, (source, destination), strict=True)
    )
    return f"from {sender} to {receiver} {protocol_text(packet)}"


def _party(party: Party, names: EventNames) -> str:
    labels = ", ".join(party.labels)
    return _peer_text(party.address, party.port, party.endpoint, party.identity, names, labels)


def _peer_text(
    ip: str, port: int | None, endpoint: int, identity: int, names: EventNames, labels: str = ""
) -> str:
    """Format name, address and identity, as far as known."""
    name = (names.address(ip) if ip else "") or (_endpoint(endpoint, names) if endpoint else "")
    address = ip if port is None or not ip else f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    known = names.identity(identity) or labels
    who = f"(identity {identity}{f' {known}' if known else ''})" if identity else ""
    return " ".join(filter(None, (name, address, who))) or "an unknown address"


def _endpoint(number: int, names: EventNames) -> str:
    return names.endpoint(number) or f"endpoint {number}"
