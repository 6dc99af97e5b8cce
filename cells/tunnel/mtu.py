"""How large packets may be that pods send to other nodes.

Needs: PodMtu, TunnelSettings.   Gives: RouteMtu.
"""

from __future__ import annotations

from typing import Final

from cells.node.devices import PodMtu
from cells.tunnel.settings import TunnelSettings

OVERHEAD: Final = 50
"""Bytes that VXLAN over IPv4 puts before a packet: Ethernet 14, VXLAN 8, UDP 8, IPv4 20."""


class RouteMtu:
    """Called, it gives the MTU of pods' routes, in bytes: their links' own, less what the tunnel needs."""

    def __init__(self, mtu: PodMtu, settings: TunnelSettings) -> None:
        self._mtu = mtu
        self._overhead = OVERHEAD if settings.tunnelled else 0

    def __call__(self) -> int:
        return self._mtu() - self._overhead
