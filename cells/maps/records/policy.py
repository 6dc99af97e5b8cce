"""Rows of an endpoint's policy map: a peer and its ports, and the verdict.

For:    the cells of policy. Needs: nothing. Gives: PolicyKey, PolicyEntry.
Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses and ports in network order.

struct.error on data of another size.
"""

from typing import ClassVar, Self

import msgspec

from cells.maps.records.abi import Layout

_policy_key = Layout("policy_key", prefixlen="I", identity="I", egress="B", protocol="B", port="2s")
_policy_entry = Layout(
    "policy_entry", proxy_port="2s", bits="B", auth_type="B", pad="4x", packets="Q", bytes="Q"
)


class PolicyKey(msgspec.Struct, frozen=True):
    """Key of a policy map, 12 bytes: peers and ports. As made from identity and direction: any port."""

    SIZE: ClassVar = _policy_key.size

    identity: int
    """Of the peer; 0: any."""
    egress: bool
    protocol: int = 0
    """IP protocol; 0: any, then the port must be any too."""
    port: int = 0
    """Destination port, or the first of an aligned range."""
    port_bits: int = 0
    """How many leading bits of the port count: 16 for one port, 0 for any."""

    def pack(self) -> bytes:
        """ValueError if the port counts without a protocol, or has bits set that do not count."""
        if (self.port_bits and not self.protocol) or self.port & (0xFFFF >> self.port_bits):
            raise ValueError(f"{self}: a port needs a protocol and no bits beyond its port_bits")
        length = 48 + self.port_bits if self.protocol else 40
        return _policy_key.pack(
            length, self.identity, self.egress, self.protocol, self.port.to_bytes(2, "big")
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        length, identity, direction, protocol, port = _policy_key.unpack(data)
        return cls(identity, bool(direction & 1), protocol, int.from_bytes(port, "big"), max(length - 48, 0))


class PolicyEntry(msgspec.Struct, frozen=True):
    """Value of a policy map, 24 bytes: the verdict, and what it was applied to so far."""

    SIZE: ClassVar = _policy_entry.size

    deny: bool = False
    proxy_port: int = 0
    auth_type: int = 0
    packets: int = 0
    octets: int = 0
    only_by_proxy: bool = False
    """Whether nothing passes while no proxy listens on the port; else it goes where it was sent."""

    def pack(self, key: PolicyKey) -> bytes:
        """The value under ``key``, whose wild protocol and port it repeats."""
        flags = self.deny | (not key.protocol) << 1 | (not key.port_bits) << 2 | self.only_by_proxy << 7
        proxy_port = self.proxy_port.to_bytes(2, "big")
        return _policy_entry.pack(proxy_port, flags, self.auth_type, self.packets, self.octets)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        proxy_port, flags, auth_type, packets, total = _policy_entry.unpack(data)
        port = int.from_bytes(proxy_port, "big")
        return cls(bool(flags & 1), port, auth_type, packets, total, bool(flags & 0x80))

    def same_verdict(self, other: "PolicyEntry") -> bool:
        """Whether they decide alike, whatever they counted."""
        return self.verdict == other.verdict

    @property
    def verdict(self) -> tuple[object, ...]:
        """What decides, without what was counted."""
        return self.deny, self.proxy_port, self.auth_type, self.only_by_proxy
