"""What is inside the maps by which the node answers for addresses of services.

For:    who announces them. Needs: nothing. Gives: L2ResponderKey, L2_RESPONDER_VALUE, AGENT_LIVENESS.
Source: Cilium 1.17 for cilium_l2_responder_v4 and cilium_runtime_config; bpf/netdev/announce.h. Addresses are
        in network order.
"""

from ipaddress import IPv4Address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import Layout

_key = Layout("l2_responder_key", ipv4="4s", ifindex="I")
_value = Layout("l2_responder_value", responses_sent="Q")

L2_RESPONDER_VALUE: Final = _value
"""Value of cilium_l2_responder_v4: how many have been answered; the programs' own."""
AGENT_LIVENESS: Final = 1
"""Index of cilium_runtime_config: when the agent was last alive, in nanoseconds of CLOCK_MONOTONIC."""


class L2ResponderKey(msgspec.Struct, frozen=True):
    """Key of cilium_l2_responder_v4, 8 bytes: an address, and the device by which it is asked for."""

    SIZE: ClassVar = _key.size

    ip: IPv4Address
    ifindex: int

    def pack(self) -> bytes:
        return _key.pack(self.ip.packed, self.ifindex)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        ip, ifindex = _key.unpack(data)
        return cls(IPv4Address(ip), ifindex)
