"""A network device of the node, and what follows from all of them.

Needs: AgentConfig, IPInterface.   Gives: Device, uplinks(), native_uplinks(), addressed(), PodMtu.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cells.config import AgentConfig
from cells.node.netlink import IPInterface
from lifecycle import Table

OTHERS = ("docker", "cni", "podman", "virbr")
"""How the names of other plugins' bridges begin; they are native only if the setting ``devices`` says so."""
OTHER_KINDS = frozenset({"vxlan", "geneve", "dummy", "ipip", "ip6tnl", "sit", "gre", "wireguard"})
"""Tunnels, behind which are others' pods, and devices that lead nowhere; the same."""
MAC_LENGTH = 6
BARE_LENGTHS = (0, 4, 16)
"""Of devices without Ethernet headers: they have no address, or a tunnel's (linux/if_arp.h)."""
OURS = "cilium_"
"""How names of the agent's own devices begin."""
LOOPBACK = "lo"
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

    @property
    def has_ethernet(self) -> bool:
        """Whether its packets begin with an Ethernet header; of L3 devices (tun, wireguard) they do not."""
        return len(self.mac) == MAC_LENGTH


def uplinks(devices: Iterable[Device]) -> list[Device]:
    """The devices packets may leave the node through, by index: addressed() and selected, but not lo."""
    return [device for device in addressed(devices) if device.selected and device.name != LOOPBACK]


def native_uplinks(devices: Iterable[Device], *, chosen: bool) -> list[Device]:
    """Those of uplinks() that programs are on, by index. ``chosen``: the setting ``devices`` names them."""
    return [each for each in uplinks(devices) if _is_native(each, chosen=chosen)]


def _is_native(device: Device, *, chosen: bool) -> bool:
    """Whether programs can be on the device, and it leads out."""
    if not device.has_ethernet and len(device.mac) not in BARE_LENGTHS:
        return False  # the format of its packets is unknown here
    return chosen or not (device.name.startswith(OTHERS) or device.kind in OTHER_KINDS)


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


class PodMtu:
    """Called, it gives the MTU of pods' links, in bytes.

    It is what is configured, else the smallest of the uplinks, else 1500.
    """

    def __init__(self, agent: AgentConfig, devices: Table[Device]) -> None:
        self._configured = agent.mtu
        self._devices = devices
        self._found = (-1, DEFAULT_MTU)
        """At which revision of the devices, and what."""

    def __call__(self) -> int:
        if self._configured:
            return self._configured
        revision = self._devices.revision
        if self._found[0] != revision:
            self._found = (
                revision,
                min((one.mtu for one in uplinks(self._devices.all())), default=DEFAULT_MTU),
            )
        return self._found[1]
