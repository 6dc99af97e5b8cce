"""Interfaces of restore to links, addresses and maps."""

import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from cells.endpoint import IPAddress
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.netlink.connection import DROP, EQUAL, LOAD_HALF, PASS, RETURN, TYPE, subscribed
from cells.netlink.rows import LinkInfo
from cells.node.local_addresses import LocalAddresses


class RestoreLinks(Protocol):
    """The links of the node."""

    def links(self) -> Sequence[LinkInfo]:
        """Every link. Raises OSError."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete these links. Raises OSError."""
        ...


class LinkEvents(Protocol):
    """Notifications of removed links."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """While the context is open, its callable waits until a link was removed since the last call.

        The callable raises OSError if notifications may be lost: open the context again and list the links.
        """
        ...


class RestoreAddresses(Protocol):
    """The address allocator."""

    def covers(self, ip: IPAddress) -> bool:
        """Whether the address can be allocated: its family is enabled, and the node's range contains it."""
        ...

    @property
    def default_pool(self) -> str:
        """The pool for saved state that names none."""
        ...

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> object:
        """Claim exactly this address. Raises IpamError."""
        ...

    def hold(self, ip: IPAddress, owner: str) -> None:
        """Reserve an address in use outside all ranges: a range that is added later must not allocate it."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Return the address to its pool."""
        ...


class LxcRow(msgspec.Struct, frozen=True):
    """An entry of cilium_lxc: an address and where the datapath delivers its packets."""

    ip: IPAddress
    endpoint_id: int
    ifindex: int
    identity: int
    is_host: bool


class StaleMaps(Protocol):
    """The maps as the previous agent left them. Calls raise OSError; removing a missing entry is a no-op."""

    def addresses(self) -> list[LxcRow]:
        """The entries of cilium_lxc."""
        ...

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        """Claim these addresses for endpoints; entries of other addresses may be removed from now on."""
        ...

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Remove the endpoint's entry from cilium_lxc."""
        ...

    def configs(self) -> list[int]:
        """The link indexes in hive_endpoints."""
        ...

    def drop_config(self, ifindex: int) -> None:
        """Remove a link index from hive_endpoints."""
        ...

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Prepare the policy maps of these endpoints, so that adopting them does not wait."""
        ...

    async def sweep_policies(self) -> None:
        """Remove the policy maps that were not adopted."""
        ...


class PreviousAgent(Protocol):
    """State of Cilium's own agent, on a node that was migrated from it."""

    def release_previous(self, keep: Collection[int]) -> None:
        """Detach its programs from every interface except ``keep`` (indexes). Raises OSError."""
        ...


# Notifications of removed links from the kernel.

_RTMGRP_LINK: Final = 0x1
_RTM_DELLINK: Final = 17

REMOVED: Final = (
    (LOAD_HALF, 0, 0, TYPE),
    (EQUAL, 0, 1, socket.htons(_RTM_DELLINK)),
    (RETURN, 0, 0, PASS),
    (RETURN, 0, 0, DROP),
)


class KernelLinkEvents:
    """Implements :class:`~cells.endpoint.restore.edges.LinkEvents` by rtnetlink."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Messages are not parsed: the links are listed again. OSError if the socket overran."""
        return subscribed(_RTMGRP_LINK, REMOVED)


# The maps as the previous agent left them.

_ifindex: Final = struct.Struct("<I")


class KernelStaleMaps:
    """Implements :class:`~cells.endpoint.restore.edges.StaleMaps` by the node's maps."""

    def __init__(self, maps: Maps, local: LocalAddresses, policies: PolicyMaps) -> None:
        self._maps = maps
        self._local = local
        self._claimed = local.table.initializer("endpoint-restore")
        self._policies = policies

    def addresses(self) -> list[LxcRow]:
        """The entries of cilium_lxc."""
        rows = {row.ip: row.value for row in self._local.table.all()} | dict(self._local.leftovers)
        return [
            LxcRow(ip, row.endpoint_id, row.ifindex, row.identity, row.is_host) for ip, row in rows.items()
        ]

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        """Claim the previous agent's entries of these addresses for endpoints."""
        self._local.keep(ips)
        self._claimed.done()

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Remove the endpoint's entry from cilium_lxc."""
        self._local.drop_endpoint(ip, endpoint_id)

    def configs(self) -> list[int]:
        """The link indexes in hive_endpoints."""
        return [_ifindex.unpack(key)[0] for key, _ in self._maps.endpoints.items()]

    def drop_config(self, ifindex: int) -> None:
        """Remove a link index from hive_endpoints."""
        self._maps.endpoints.delete(_ifindex.pack(ifindex))

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Create lost policy maps again."""
        await self._policies.prepare(endpoint_ids)

    async def sweep_policies(self) -> None:
        """Remove the policy maps that were not adopted."""
        await self._policies.sweep()
