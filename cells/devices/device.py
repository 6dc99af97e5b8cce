"""A network device of the node, and what follows from all of them.

Needs: IPInterface.   Gives: Device, uplinks(), addressed(), pod_mtu().
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cells.netlink import IPInterface

OURS = "cilium_"
"""How names of the agent's own devices begin."""
DEFAULT_MTU = 1500


@dataclass(frozen=True, slots=True)
class Device:
    """One link of the node that is no pod's, with its addresses: IPv4, then IPv6.

    Those of a family are in the kernel's order (primary first). Link-local IPv6 addresses are left out:
    every link has one, and nothing follows from it.

    ``kind`` is what rtnetlink calls it ("veth", "vxlan" …), "" for hardware and lo.
    """

    ifindex: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    up: bool
    addresses: tuple[IPInterface, ...]
    selected: bool = True
    """Whether the setting ``devices`` lets it be an uplink."""


def uplinks(devices: Iterable[Device]) -> list[Device]:
    """The devices packets may leave the node through, by index: addressed() and selected."""
    return [device for device in addressed(devices) if device.selected]


def addressed(devices: Iterable[Device]) -> list[Device]:
    """The devices with which the node is in some network, by index: up, not ours, with an address."""
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
