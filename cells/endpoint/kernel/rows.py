"""An endpoint's rows in the BPF maps.

For:   Endpoints and endpoint restore.   Needs: Maps, Collector.   Gives: KernelMaps, packed rows.
Source: Cilium 1.17 for cilium_lxc; hive_endpoints is our own.

A row that is right is not written again: a running pod's traffic reads it at this moment.
"""

import struct
from collections.abc import Collection

from cells.datapath import Collector
from cells.endpoint.table.model import Endpoint, IPAddress
from cells.maps import (
    ENDPOINT_ANY_SOURCE,
    ENDPOINT_GUARDED,
    ENDPOINT_PASSES_NEIGHBOURS,
    ENDPOINT_UNROUTED,
    EndpointConfig,
    LxcKey,
    LxcValue,
    Maps,
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


def ifindex_key(ifindex: int) -> bytes:
    """Key of hive_endpoints."""
    return struct.pack("<I", ifindex)


class KernelMaps:
    """The real :class:`~cells.endpoint.kernel.edges.EndpointMaps`."""

    def __init__(self, maps: Maps, collector: Collector) -> None:
        self._maps = maps
        self._collector = collector

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

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Have the kernel go through the conntrack maps."""
        return await self._collector.forget(addresses)
