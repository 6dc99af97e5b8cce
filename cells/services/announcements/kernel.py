"""The maps by which programs answer, and the network that is told.

For:    Elections and Responder. Needs: Maps, AnnouncementSettings.
Gives:  ResponderKernel (a Protocol), KernelResponder, announcement().
Source: RFC 826; RFC 5227 section 2.3, announcing an address.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Mapping
from contextlib import closing
from ipaddress import IPv4Address
from typing import Final, Protocol

from cells.maps import AGENT_LIVENESS, NOEXIST, BpfError, L2ResponderKey, Maps
from cells.node.netlink import parse_mac
from cells.services.settings import AnnouncementSettings
from lifecycle import HiveError

BROADCAST: Final = b"\xff" * 6
_NONE_YET: Final = bytes(8)
_INDEX: Final = struct.pack("<I", AGENT_LIVENESS)
_TIME: Final = struct.Struct("<Q")

Frame = tuple[str, IPv4Address, str]
"""Device, address, MAC."""


class ResponderKernel(Protocol):
    """What the programs look at, and the network. Methods raise OSError and HiveError."""

    def held(self) -> list[L2ResponderKey]:
        """What is answered for."""
        ...

    def add(self, key: L2ResponderKey) -> bool:
        """Answer for it, too; whether it is new. The count of one that is there stays."""
        ...

    def delete(self, key: L2ResponderKey) -> None:
        """Answer for it no more."""
        ...

    def alive(self, moment: int) -> None:
        """When the agent was last alive, in nanoseconds of CLOCK_MONOTONIC."""
        ...

    def tell(self, frames: Mapping[L2ResponderKey, Frame]) -> dict[L2ResponderKey, OSError]:
        """Tell networks where addresses are now; what failed. Called in a worker thread."""
        ...


class KernelResponder:
    """The real one."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, settings: AnnouncementSettings) -> ResponderKernel:
        """This node's."""
        if settings.enable_l2_announcements:
            maps.use("l2_responder4")
        return KernelResponder(maps)

    def held(self) -> list[L2ResponderKey]:
        """What is answered for."""
        return [L2ResponderKey.unpack(raw) for raw, _ in self._maps.l2_responder4.items()]

    def add(self, key: L2ResponderKey) -> bool:
        """Answer for it, too; whether it is new."""
        found = self._maps.l2_responder4
        try:
            found.update(key.pack(), _NONE_YET, NOEXIST)
        except BpfError as error:
            if error.errno == errno.E2BIG:
                raise HiveError(
                    f"{found.spec.name} is full: it has {found.spec.max_entries} entries"
                ) from error
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def delete(self, key: L2ResponderKey) -> None:
        """Answer for it no more."""
        self._maps.l2_responder4.delete(key.pack())

    def alive(self, moment: int) -> None:
        """When the agent was last alive."""
        self._maps.runtime_config.update(_INDEX, _TIME.pack(moment))

    def tell(self, frames: Mapping[L2ResponderKey, Frame]) -> dict[L2ResponderKey, OSError]:
        """Tell networks where addresses are now. Closing the socket waits for RCU."""
        failed: dict[L2ResponderKey, OSError] = {}
        try:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except OSError as error:  # without CAP_NET_RAW
            return dict.fromkeys(frames, error)
        with closing(made) as own:
            for key, (device, ip, mac) in frames.items():
                try:
                    own.sendto(announcement(ip, parse_mac(mac)), (device, 0))
                except OSError as error:
                    failed[key] = error
        return failed


def announcement(ip: IPv4Address, mac: bytes) -> bytes:
    """The frame that tells a network where an address is now: it asks for itself."""
    header = BROADCAST + mac + struct.pack(">HHHBBH", 0x0806, 1, 0x0800, 6, 4, 1)
    return header + mac + ip.packed + bytes(6) + ip.packed
