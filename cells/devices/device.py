"""A network device of the node. Needs: nothing.   Gives: Device."""

from dataclasses import dataclass
from ipaddress import IPv4Interface


@dataclass(frozen=True, slots=True)
class Device:
    """One link of the node that is no pod's, with its IPv4 addresses in the kernel's order (primary first).

    ``kind`` is what rtnetlink calls it ("veth", "vxlan" …), "" for hardware and lo.
    """

    ifindex: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    up: bool
    addresses: tuple[IPv4Interface, ...]
