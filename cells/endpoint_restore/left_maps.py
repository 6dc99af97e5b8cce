"""The maps as the last agent left them.

For:   RestoredEndpoints.   Needs: Maps, PolicyMaps.   Gives: KernelLeftMaps.
"""

import struct
from collections.abc import Collection
from ipaddress import IPv4Address
from typing import Final

from cells.endpoint import FIRST_IDENTITY, INIT, LAST_IDENTITY, IPAddress
from cells.endpoint_restore.edges import LeftAddress
from cells.maps import IpcacheKey, IpcacheValue, LxcKey, LxcValue, Maps, PolicyMaps

_HERE: Final = IPv4Address(0)
_ifindex: Final = struct.Struct("<I")


class KernelLeftMaps:
    """The real :class:`~cells.endpoint_restore.edges.LeftMaps`."""

    def __init__(self, maps: Maps, policies: PolicyMaps) -> None:
        self._maps = maps
        self._policies = policies

    def addresses(self) -> list[LeftAddress]:
        """The rows of cilium_lxc."""
        rows = []
        for key, value in self._maps.lxc.items():
            ip, row = LxcKey.unpack(key).ip, LxcValue.unpack(value)
            rows.append(LeftAddress(ip, row.endpoint_id, row.ifindex, row.identity, row.is_host))
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

    def local_identities(self) -> dict[IPAddress, int]:
        """Addresses whose identity is an endpoint's and that are not behind a tunnel."""
        found = {}
        for packed_key, packed_value in self._maps.ipcache.items():
            key, value = IpcacheKey.unpack(packed_key), IpcacheValue.unpack(packed_value)
            if (
                key.bits == key.ip.max_prefixlen
                and value.tunnel_endpoint == _HERE
                and (value.identity == INIT or FIRST_IDENTITY <= value.identity <= LAST_IDENTITY)
            ):
                found[key.ip] = value.identity
        return found

    def drop_identity(self, ip: IPAddress) -> None:
        """Remove a single address from cilium_ipcache."""
        self._maps.ipcache.delete(IpcacheKey.host(ip).pack())
        self._maps.epochs.bump()

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Make anew what policy maps are lost."""
        await self._policies.prepare(endpoint_ids)

    async def sweep_policies(self) -> None:
        """Remove the policy maps nobody has taken over."""
        await self._policies.sweep()
