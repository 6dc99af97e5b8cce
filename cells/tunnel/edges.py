"""What the tunnel touches of the kernel, in the words of this cell.

Needs: nothing.   Gives: TunnelLinks, TunnelRoutes, TunnelMaps (Protocols).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cells.ipam import IPNetwork
from cells.maps import TunnelConfig, TunnelKey, TunnelValue
from cells.node.netlink import FoundVxlan
from cells.tunnel.network import TunnelRoute
from cells.tunnel.objects import TunnelDevice


class TunnelLinks(Protocol):
    """The node's links; TunnelNetwork. Methods raise NetlinkError."""

    async def find(self, name: str) -> FoundVxlan | None:
        """The link of that name."""
        ...

    async def create(self, name: str, device: TunnelDevice) -> None:
        """Make the device, down."""
        ...

    async def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """The MTU, and up."""
        ...

    async def delete(self, ifindex: int) -> None:
        """Remove a link."""
        ...


class TunnelRoutes(Protocol):
    """The node's routes; TunnelNetwork. Methods raise NetlinkError."""

    async def routes(self, name: str) -> list[TunnelRoute]:
        """Those of ours over the link of that name."""
        ...

    async def set_route(self, name: str, route: TunnelRoute) -> None:
        """In place of another one of ours to there."""
        ...

    async def foreign(self) -> Mapping[IPNetwork, str]:
        """Destinations of routes that are not ours, and how each goes on."""
        ...

    async def remove_route(self, name: str, destination: IPNetwork) -> None:
        """Remove; gone already is fine."""
        ...


class TunnelMaps(Protocol):
    """hive_tunnel and cilium_tunnel_map. Methods raise OSError."""

    def facts(self) -> TunnelConfig:
        """What the programs know of the tunnel."""
        ...

    def tell(self, facts: TunnelConfig) -> None:
        """Have them know this from the next packet on."""
        ...

    def endpoints(self) -> Mapping[TunnelKey, TunnelValue]:
        """Every row of cilium_tunnel_map; called in a thread, at any time."""
        ...

    def put_endpoint(self, key: TunnelKey, value: TunnelValue) -> None:
        """Write a row."""
        ...

    def drop_endpoint(self, key: TunnelKey) -> None:
        """Remove a row; gone already is fine."""
        ...

    def void_verdicts(self) -> None:
        """Make the datapath evaluate the next packet of every flow again."""
        ...
