"""An endpoint's rows in the BPF maps.

For:   Endpoints and endpoint restore.   Needs: Maps, LocalAddresses, Collector.   Gives: KernelMaps, rows.
Source: Cilium 1.17 for cilium_lxc; hive_endpoints is our own.

A row that is right is not written again: a running pod's traffic reads it at this moment.
"""

import struct
from collections.abc import Collection

from cells.datapath import Collector
from cells.endpoint.table.model import Endpoint, IPAddress
from cells.maps import (
    ENDPOINT_ANY_SOURCE,
    ENDPOINT_PASSES_NEIGHBOURS,
    ENDPOINT_REQUIRE_EGRESS_PROG,
    ENDPOINT_ROUTED_BY_HOST,
    EndpointConfig,
    LxcValue,
    Maps,
)
from cells.node.local_addresses import LocalAddresses


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
        | (ENDPOINT_REQUIRE_EGRESS_PROG if wanted.egress_prog else 0)
        | (ENDPOINT_ROUTED_BY_HOST if wanted.require_routing is False else 0)
    )


def lxc_value(endpoint: Endpoint) -> LxcValue:
    """What its addresses have in cilium_lxc."""
    return LxcValue(
        ifindex=endpoint.ifindex,
        endpoint_id=endpoint.id,
        mac=endpoint.pod_mac,
        node_mac=endpoint.host_mac,
        identity=endpoint.identity,
    )


def ifindex_key(ifindex: int) -> bytes:
    """Key of hive_endpoints."""
    return struct.pack("<I", ifindex)


class KernelMaps:
    """The real :class:`~cells.endpoint.kernel.edges.EndpointMaps`."""

    def __init__(self, maps: Maps, local: LocalAddresses, collector: Collector) -> None:
        self._maps = maps
        self._local = local
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
        """Claim its addresses."""
        self._local.put_endpoint(endpoint.addresses, lxc_value(endpoint))

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Withdraw what is still this endpoint's."""
        for address in endpoint.addresses:
            self._local.drop_endpoint(address, endpoint.id)

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Have the kernel go through the conntrack maps."""
        return await self._collector.forget(addresses)
