"""What the numbers of the datapath mean: why packets were dropped, where they were seen, what matched.

For:    events, metrics, tools. Needs: nothing. Gives: DROP_REASONS, FORWARD_REASONS, reason_name() and more.
Source: Cilium 1.17, pkg/monitor/api (the numbers and their texts are public); bpf/lib/reasons.h has ours.
"""

from typing import Final

FORWARD_REASONS: Final = {
    0: "Success",
    3: "Interface",
    4: "Interface Decrypted",
    5: "LB: No backend slot entry found",
    6: "LB: No backend entry found",
    7: "Reverse entry update failed",
    8: "Reverse entry stale",
    9: "Fragmented packet",
    10: "Fragmented packet entry update failed",
    11: "Missed tail call to custom program",
}
"""Reasons below 128, that packets are counted under without being dropped."""

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
"""Reasons from 128 on, that packets are dropped for."""

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
"""Where the datapath saw a packet: the subtype of a trace event."""

TRACE_REASONS: Final = {0: "new", 1: "established", 2: "reply", 3: "related", 5: "unknown"}
"""What conntrack took the packet of a trace event for."""

MATCH_TYPES: Final = {
    0: "none",
    1: "L3-Only",
    2: "L3-L4",
    3: "L4-Only",
    4: "all",
    5: "L3-Proto",
    6: "Proto-Only",
}
"""Which kind of policy entry decided a policy verdict."""


def reason_name(reason: int) -> str:
    """The text for a reason of an event or of cilium_metrics; the number itself if it is unknown."""
    return DROP_REASONS.get(reason) or FORWARD_REASONS.get(reason) or str(reason)


SOCKET_POINTS: Final = {1: "pre-xlate-fwd", 2: "post-xlate-fwd", 3: "pre-xlate-rev", 4: "post-xlate-rev"}
"""Where an event of a socket is from."""

SOCKET_PROTOCOLS: Final = {1: "tcp", 2: "udp"}
