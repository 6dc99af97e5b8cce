"""Where the ranges of other nodes' pods go: cilium_tunnel_map, and routes over cilium_host.

Needs: TunnelMaps, TunnelRoutes.   Gives: EndpointRows, NetworkRoutes, KernelTunnelMaps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from anyio import to_thread

from cells.ipam import IPNetwork
from cells.maps import Maps, TunnelConfig, TunnelKey, TunnelValue, map_by_id
from cells.node.netlink import ForeignRouteError
from cells.tunnel.edges import TunnelMaps, TunnelRoutes
from cells.tunnel.network import TunnelRoute
from lifecycle import BatchFailures, HiveError

HOST_LINK: Final = "cilium_host"


class KernelTunnelMaps:
    """The real :class:`~cells.tunnel.edges.TunnelMaps`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def facts(self) -> TunnelConfig:
        """What the programs know."""
        return TunnelConfig.unpack(self._maps.tunnel.lookup(bytes(4)) or bytes(TunnelConfig.SIZE))

    def tell(self, facts: TunnelConfig) -> None:
        """Have them know this."""
        self._maps.tunnel.update(bytes(4), facts.pack())

    def endpoints(self) -> Mapping[TunnelKey, TunnelValue]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        with map_by_id(self._maps.tunnels.id) as table:
            return {TunnelKey.unpack(key): TunnelValue.unpack(value) for key, value in table.items()}

    def put_endpoint(self, key: TunnelKey, value: TunnelValue) -> None:
        """Write a row."""
        self._maps.tunnels.update(key.pack(), value.pack())

    def drop_endpoint(self, key: TunnelKey) -> None:
        """Remove a row."""
        self._maps.tunnels.delete(key.pack())

    def void_verdicts(self) -> None:
        """The node's epoch."""
        self._maps.epochs.bump()


class EndpointRows:
    """cilium_tunnel_map, by network address."""

    def __init__(self, maps: TunnelMaps) -> None:
        self._maps = maps

    async def dump(self) -> Mapping[TunnelKey, TunnelValue]:
        """Every row."""
        return await to_thread.run_sync(self._maps.endpoints)

    async def put(self, batch: Mapping[TunnelKey, TunnelValue]) -> None:
        """Write rows. Raises BatchError."""
        self._each(batch)

    async def drop(self, batch: Collection[TunnelKey]) -> None:
        """Remove rows. Raises BatchError."""
        self._each(dict.fromkeys(batch))

    def _each(self, values: Mapping[TunnelKey, TunnelValue | None]) -> None:
        with BatchFailures(OSError) as failures:
            for key, value in values.items():
                with failures.of(key):
                    if value is None:
                        self._maps.drop_endpoint(key)
                    else:
                        self._maps.put_endpoint(key, value)
            self._maps.void_verdicts()  # flows to these networks go another way now


class NetworkRoutes:
    """The node's own way to pods of other nodes, and what it forwards there: over cilium_host."""

    def __init__(self, kernel: TunnelRoutes) -> None:
        self._kernel = kernel

    async def dump(self) -> Mapping[IPNetwork, TunnelRoute]:
        """Those there are."""
        return {route.key: route for route in await self._kernel.routes(HOST_LINK)}

    async def put(self, batch: Mapping[IPNetwork, TunnelRoute]) -> None:
        """Set routes. Raises BatchError."""
        foreign = await self._kernel.foreign()
        with BatchFailures(OSError, HiveError) as failures:
            for route in batch.values():
                with failures.of(route.key):
                    if route.key in foreign:
                        raise ForeignRouteError(route.key, foreign[route.key])
                    await self._kernel.set_route(HOST_LINK, route)

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Remove routes. Raises BatchError."""
        with BatchFailures(OSError) as failures:
            for destination in batch:
                with failures.of(destination):
                    await self._kernel.remove_route(HOST_LINK, destination)
