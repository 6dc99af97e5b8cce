"""A network device of the node, and what follows from all of them.

Needs: nothing.   Gives: Device, uplinks(), pod_mtu().
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Interface

OURS = "cilium_"
"""How names of the agent's own devices begin."""
DEFAULT_MTU = 1500


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


def uplinks(devices: Iterable[Device]) -> list[Device]:
    """The devices packets may leave the node through, by index: up, not ours, and with an address."""
    return sorted(
        (
            device
            for device in devices
            if device.up
            and not device.name.startswith(OURS)
            and any(not address.ip.is_loopback for address in device.addresses)
        ),
        key=lambda device: device.ifindex,
    )


def pod_mtu(configured: int, devices: Iterable[Device]) -> int:
    """MTU of pods' links in bytes: as configured, else the smallest of the uplinks, else 1500."""
    return configured or min((device.mtu for device in uplinks(devices)), default=DEFAULT_MTU)
