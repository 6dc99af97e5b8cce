"""The maps as the last agent left them.

For:   RestoredEndpoints.   Needs: Maps, PolicyMaps.   Gives: KernelStaleMaps.
"""

import struct
from collections.abc import Collection
from typing import Final

from cells.endpoint import IPAddress
from cells.endpoint.restore.edges import LxcRow
from cells.maps import LxcKey, LxcValue, Maps, PolicyMaps

_ifindex: Final = struct.Struct("<I")


class KernelStaleMaps:
    """The real :class:`~cells.endpoint.restore.edges.StaleMaps`."""

    def __init__(self, maps: Maps, policies: PolicyMaps) -> None:
        self._maps = maps
        self._policies = policies

    def addresses(self) -> list[LxcRow]:
        """The rows of cilium_lxc."""
        rows = []
        for key, value in self._maps.lxc.items():
            ip, row = LxcKey.unpack(key).ip, LxcValue.unpack(value)
            rows.append(LxcRow(ip, row.endpoint_id, row.ifindex, row.identity, row.is_host))
        return rows

    def drop_address(self, ip: IPAddress) -> None:
        """Remove the address from cilium_lxc."""
        self._maps.lxc.delete(LxcKey(ip).pack())
        self._maps.epochs.bump()

    def configs(self) -> list[int]:
        """The link indexes in hive_endpoints."""
        return [_ifindex.unpack(key)[0] for key, _ in self._maps.endpoints.items()]

    def drop_config(self, ifindex: int) -> None:
        """Remove a link index from hive_endpoints; the epoch goes on with the policy map, which goes next."""
        self._maps.endpoints.delete(_ifindex.pack(ifindex))

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Make anew what policy maps are lost."""
        await self._policies.prepare(endpoint_ids)

    async def sweep_policies(self) -> None:
        """Remove the policy maps nobody has taken over."""
        await self._policies.sweep()
