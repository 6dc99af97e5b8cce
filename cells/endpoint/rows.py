"""An endpoint's rows in the BPF maps.

For:   Endpoints and endpoint restore.   Needs: Maps, PolicyMaps, Collector.   Gives: KernelMaps, packed rows.
Source: Cilium 1.17 for cilium_lxc, cilium_ipcache and policy maps; hive_endpoints is our own.

A row that is right is not written again: a running pod's traffic reads it at this moment.
"""

import struct
from collections.abc import Collection

from cells.datapath import Collector
from cells.endpoint.identity import HOST
from cells.endpoint.kernel import PolicySlot
from cells.endpoint.model import Endpoint, IPAddress
from cells.endpoint.policy import PolicyEntries
from cells.maps import (
    ENDPOINT_ANY_SOURCE,
    ENDPOINT_GUARDED,
    ENDPOINT_PASSES_NEIGHBOURS,
    ENDPOINT_UNROUTED,
    EndpointConfig,
    IpcacheKey,
    IpcacheValue,
    LxcKey,
    LxcValue,
    Maps,
    PolicyMap,
    PolicyMaps,
)


def config_row(endpoint: Endpoint, *, any_source: bool) -> tuple[bytes, bytes]:
    """Key and value in hive_endpoints."""
    value = EndpointConfig(
        ipv4=endpoint.ipv4,
        endpoint_id=endpoint.id,
        identity=endpoint.identity,
        host_mac=endpoint.host_mac,
        pod_mac=endpoint.pod_mac,
        flags=_flags(endpoint, any_source=any_source),
        ipv6=endpoint.ipv6,
        netns_cookie=endpoint.netns_cookie,
    )
    return ifindex_key(endpoint.ifindex), value.pack()


def _flags(endpoint: Endpoint, *, any_source: bool) -> int:
    wanted = endpoint.datapath
    return (
        (ENDPOINT_PASSES_NEIGHBOURS if wanted.require_arp_passthrough else 0)
        | (ENDPOINT_ANY_SOURCE if any_source else 0)
        | (ENDPOINT_GUARDED if wanted.guarded else 0)
        | (ENDPOINT_UNROUTED if wanted.require_routing is False else 0)
    )


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

    def __init__(self, maps: Maps, policies: PolicyMaps, collector: Collector) -> None:
        self._maps = maps
        self._policies = policies
        self._collector = collector
        self._slots: dict[int, PolicyMap] = {}

    def acquire_policy(self) -> PolicySlot:
        """A prepared number and policy map."""
        return self._keep(self._policies.acquire())

    def adopt_policy(self, endpoint_id: int) -> PolicySlot:
        """The number and policy map of before the restart."""
        return self._keep(self._policies.adopt(endpoint_id))

    def fill_policy(self, policy: PolicySlot, entries: PolicyEntries) -> None:
        """Write what changed since it was last written."""
        self._slots[policy.endpoint_id].replace(entries)

    def reconcile_policy(self, policy: PolicySlot, entries: PolicyEntries) -> int:
        """Read the whole map; write it only where it is wrong."""
        slot = self._slots[policy.endpoint_id]
        present = slot.dump()
        wrong = len(present.keys() ^ entries.keys()) + sum(
            not entry.same_verdict(present[key]) for key, entry in entries.items() if key in present
        )
        if wrong:
            slot.reload()
            slot.replace(entries)
        return wrong

    def release_policy(self, policy: PolicySlot) -> None:
        """Give it back; twice does nothing."""
        slot = self._slots.pop(policy.endpoint_id, None)
        if slot is not None:
            self._policies.release(slot)

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Write the row unless it is right."""
        key, row = config_row(endpoint, any_source=any_source)
        present = self._maps.endpoints.lookup(key)
        if present != row:
            self._maps.endpoints.update(key, row)
            if present is not None:
                self._maps.epochs.bump(EndpointConfig.unpack(present).endpoint_id)

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the row."""
        self._maps.endpoints.delete(ifindex_key(endpoint.ifindex))
        self._maps.epochs.bump(endpoint.id)

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Write what is not right, unless the node itself has the address now: the node wins."""
        for address in endpoint.addresses:
            key, row = lxc_row(endpoint, address)
            present = self._maps.lxc.lookup(key)
            if present != row and not (present and LxcValue.unpack(present).is_host):
                self._maps.lxc.update(key, row)
                if present is not None:
                    self._maps.epochs.bump()

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Remove what still leads to this endpoint."""
        for address in endpoint.addresses:
            key = LxcKey(address).pack()
            value = self._maps.lxc.lookup(key)
            if value is not None and LxcValue.unpack(value).endpoint_id == endpoint.id:
                self._maps.lxc.delete(key)
                self._maps.epochs.bump()

    def put_ipcache(self, endpoint: Endpoint) -> None:
        """Write what is not right, unless the node itself has the address now."""
        for address in endpoint.addresses:
            key, row = ipcache_row(endpoint, address)
            present = self._maps.ipcache.lookup(key)
            if present != row and not (present and IpcacheValue.unpack(present).identity == HOST):
                self._maps.ipcache.update(key, row)
                if present is not None:
                    self._maps.epochs.bump()

    def drop_ipcache(self, endpoint: Endpoint) -> None:
        """Remove what still tells this endpoint's identity."""
        for address in endpoint.addresses:
            key, ours = ipcache_row(endpoint, address)
            if self._maps.ipcache.lookup(key) == ours:
                self._maps.ipcache.delete(key)
                self._maps.epochs.bump()

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Have the kernel go through the conntrack maps."""
        return await self._collector.forget(addresses)

    def _keep(self, slot: PolicyMap) -> PolicyMap:
        self._slots[slot.endpoint_id] = slot
        return slot
