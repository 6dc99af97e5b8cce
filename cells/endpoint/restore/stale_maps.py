"""The maps as the last agent left them.

For:   RestoredEndpoints.   Needs: Maps, LocalAddresses, PolicyMaps.   Gives: KernelStaleMaps.
"""

import struct
from collections.abc import Collection
from typing import Final

from cells.endpoint import IPAddress
from cells.endpoint.restore.edges import LxcRow
from cells.maps import Maps, PolicyMaps
from cells.node.local_addresses import LocalAddresses

_ifindex: Final = struct.Struct("<I")


class KernelStaleMaps:
    """The real :class:`~cells.endpoint.restore.edges.StaleMaps`."""

    def __init__(self, maps: Maps, local: LocalAddresses, policies: PolicyMaps) -> None:
        self._maps = maps
        self._local = local
        self._claimed = local.table.initializer("endpoint-restore")
        self._policies = policies

    def addresses(self) -> list[LxcRow]:
        """The rows of cilium_lxc."""
        rows = {row.ip: row.value for row in self._local.table.all()} | dict(self._local.leftovers)
        return [
            LxcRow(ip, row.endpoint_id, row.ifindex, row.identity, row.is_host) for ip, row in rows.items()
        ]

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        """Claim for endpoints what a former agent wrote of these addresses."""
        self._local.keep(ips)
        self._claimed.done()

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Remove the endpoint's row from cilium_lxc."""
        self._local.drop_endpoint(ip, endpoint_id)

    def configs(self) -> list[int]:
        """The link indexes in hive_endpoints."""
        return [_ifindex.unpack(key)[0] for key, _ in self._maps.endpoints.items()]

    def drop_config(self, ifindex: int) -> None:
        """Remove a link index from hive_endpoints; the epoch goes on with the policy map, which goes next."""
        self._maps.endpoints.delete(_ifindex.pack(ifindex))

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Create lost policy maps again."""
        await self._policies.prepare(endpoint_ids)

    async def sweep_policies(self) -> None:
        """Remove the policy maps that were not taken over."""
        await self._policies.sweep()
