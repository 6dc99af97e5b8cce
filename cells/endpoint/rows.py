"""An endpoint's rows in the BPF maps.

For:   Endpoints and endpoint restore.   Needs: Maps, PolicyMaps.   Gives: KernelMaps, and the packed rows.
Source: Cilium 1.17 for cilium_lxc, cilium_ipcache and policy maps; hive_endpoints is our own.

A row that is right is not written again: a running pod's traffic reads it at this moment.
"""

import struct
from collections.abc import Collection
from ipaddress import IPv4Address
from typing import Final

import anyio.to_thread

from cells.endpoint.identity import HOST
from cells.endpoint.kernel import PolicySlot
from cells.endpoint.model import Endpoint, IPAddress
from cells.maps import (
    EndpointConfig,
    IpcacheKey,
    IpcacheValue,
    LxcKey,
    LxcValue,
    Maps,
    PolicyEntry,
    PolicyKey,
    PolicyMap,
    PolicyMaps,
    map_by_id,
)

ALLOW_ALL: Final = {
    PolicyKey(identity=0, egress=False): PolicyEntry(),
    PolicyKey(identity=0, egress=True): PolicyEntry(),
}
"""What an endpoint that no policy selects may do: everything, in both directions."""


def config_row(endpoint: Endpoint) -> tuple[bytes, bytes]:
    """Key and value in hive_endpoints."""
    value = EndpointConfig(
        ipv4=endpoint.ipv4 or IPv4Address(0),
        endpoint_id=endpoint.id,
        identity=endpoint.identity,
        host_mac=endpoint.host_mac,
        pod_mac=endpoint.pod_mac,
    )
    return ifindex_key(endpoint.ifindex), value.pack()


def lxc_row(endpoint: Endpoint, address: IPAddress) -> tuple[bytes, bytes]:
    """Key and value in cilium_lxc."""
    value = LxcValue(
        ifindex=endpoint.ifindex,
        endpoint_id=endpoint.id,
        mac=endpoint.pod_mac,
        node_mac=endpoint.host_mac,
        identity=endpoint.identity,
    )
    return LxcKey(address).pack(), value.pack()


def ipcache_row(endpoint: Endpoint, address: IPAddress) -> tuple[bytes, bytes]:
    """Key and value in cilium_ipcache: the pod is on this node, so there is no tunnel endpoint."""
    return IpcacheKey.host(address).pack(), IpcacheValue(endpoint.identity).pack()


def ifindex_key(ifindex: int) -> bytes:
    """Key of hive_endpoints."""
    return struct.pack("<I", ifindex)


class KernelMaps:
    """The real :class:`~cells.endpoint.kernel.EndpointMaps`."""

    def __init__(self, maps: Maps, policies: PolicyMaps) -> None:
        self._maps = maps
        self._policies = policies
        self._slots: dict[int, PolicyMap] = {}

    def acquire_policy(self) -> PolicySlot:
        """A prepared number and policy map."""
        return self._keep(self._policies.acquire())

    def adopt_policy(self, endpoint_id: int) -> PolicySlot:
        """The number and policy map of before the restart."""
        return self._keep(self._policies.adopt(endpoint_id))

    def fill_policy(self, policy: PolicySlot) -> None:
        """No policy can be loaded yet, so every endpoint may do everything."""
        self._slots[policy.endpoint_id].replace(ALLOW_ALL)

    def release_policy(self, policy: PolicySlot) -> None:
        """Give it back; twice does nothing."""
        slot = self._slots.pop(policy.endpoint_id, None)
        if slot is not None:
            self._policies.release(slot)

    def put_config(self, endpoint: Endpoint) -> None:
        """Write the row unless it is right."""
        key, row = config_row(endpoint)
        if self._maps.endpoints.lookup(key) != row:
            self._maps.endpoints.update(key, row)

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the row."""
        self._maps.endpoints.delete(ifindex_key(endpoint.ifindex))

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Write what is not right, unless the node itself has the address now: the node wins."""
        for address in endpoint.addresses:
            key, row = lxc_row(endpoint, address)
            present = self._maps.lxc.lookup(key)
            if present != row and not (present and LxcValue.unpack(present).is_host):
                self._maps.lxc.update(key, row)

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Remove what still leads to this endpoint."""
        for address in endpoint.addresses:
            key = LxcKey(address).pack()
            value = self._maps.lxc.lookup(key)
            if value is not None and LxcValue.unpack(value).endpoint_id == endpoint.id:
                self._maps.lxc.delete(key)

    def put_ipcache(self, endpoint: Endpoint) -> None:
        """Write what is not right, unless the node itself has the address now."""
        for address in endpoint.addresses:
            key, row = ipcache_row(endpoint, address)
            present = self._maps.ipcache.lookup(key)
            if present != row and not (present and IpcacheValue.unpack(present).identity == HOST):
                self._maps.ipcache.update(key, row)

    def drop_ipcache(self, endpoint: Endpoint) -> None:
        """Remove what still tells this endpoint's identity."""
        for address in endpoint.addresses:
            key, ours = ipcache_row(endpoint, address)
            if self._maps.ipcache.lookup(key) == ours:
                self._maps.ipcache.delete(key)

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Go through the conntrack maps in a worker thread: they may be large."""
        wanted = frozenset(address.packed for address in addresses)
        ids = [self._maps.ct4_tcp.id, self._maps.ct4_any.id]
        return await anyio.to_thread.run_sync(_forget, ids, wanted)

    def _keep(self, slot: PolicyMap) -> PolicyMap:
        self._slots[slot.endpoint_id] = slot
        return slot


def _forget(map_ids: list[int], addresses: frozenset[bytes]) -> int:
    """Remove the entries from or to the addresses from these conntrack maps (key: daddr, saddr, …)."""
    removed = 0
    for each in map_ids:
        with map_by_id(each) as table:  # this thread's own
            found = [key for key, _ in table.items() if key[:4] in addresses or key[4:8] in addresses]
            removed += sum(map(table.delete, found))
    return removed
