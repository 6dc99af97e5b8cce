"""The connections in the kernel's conntrack maps.

For:    NameStore. Needs: Maps. Gives: KernelConnections.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from ipaddress import ip_address

from anyio import to_thread

from cells.ipam import IPAddress
from cells.maps import CT_OUT, CtEntry, Maps, map_by_id


class KernelConnections:
    """The real :class:`~cells.proxy.dns.store.Connections`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    async def alive(self, addresses: Collection[IPAddress]) -> set[tuple[IPAddress, IPAddress]]:
        """From the pod to the address, for those that go on. Raises OSError."""
        return await to_thread.run_sync(self._alive, {one.packed for one in addresses})

    def _alive(self, packed: Collection[bytes]) -> set[tuple[IPAddress, IPAddress]]:
        """Of a pod's own connection the key has the pod's address first (see CtKey), and CT_OUT."""
        now = int(time.clock_gettime(time.CLOCK_MONOTONIC))
        found = set()
        for each in self._maps.conntrack:
            with map_by_id(each.id, each.spec.name) as table:
                for key, value in table.items():
                    size = (len(key) - 6) // 2
                    peer = key[size : 2 * size]
                    if peer in packed and key[-1] == CT_OUT and CtEntry.unpack(value).lifetime >= now:
                        found.add((ip_address(key[:size]), ip_address(peer)))
        return found
