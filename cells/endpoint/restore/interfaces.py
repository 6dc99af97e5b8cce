"""Interfaces of restore to links, IPAM and maps, and their implementations by the kernel."""

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
    """The interface to the node's links."""

    def links(self) -> Sequence[LinkInfo]:
        """Return all links. Raises OSError."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete these links. Raises OSError."""
        ...


class LinkEvents(Protocol):
    """The interface to notifications of deleted links."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Subscribe to deletions; the callable waits for one since its last call.

        The callable raises OSError if notifications may be lost: open the context again and list the links.
        """
        ...


class RestoreAddresses(Protocol):
    """The interface to the node's IPAM."""

    def covers(self, ip: IPAddress) -> bool:
        """Whether the address can be allocated: its family is enabled and it is in a pod CIDR of the node."""
        ...

    @property
    def default_pool(self) -> str:
        """The pool for saved state without a pool."""
        ...

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> object:
        """Allocate this address. Raises IpamError."""
        ...

    def hold(self, ip: IPAddress, owner: str) -> None:
        """Reserve an address outside all pod CIDRs, so that a CIDR added later does not allocate it."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Return the address to its pool."""
        ...


class LxcRow(msgspec.Struct, frozen=True):
    """An entry of cilium_lxc: an address and the endpoint to which packets are delivered."""

    ip: IPAddress
    endpoint_id: int
    ifindex: int
    identity: int
    is_host: bool


class StaleMaps(Protocol):
    """The interface to the maps of the previous agent. Methods raise OSError; missing entries are no-ops."""

    def addresses(self) -> list[LxcRow]:
        """Return the entries of cilium_lxc."""
        ...

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        """Claim entries of these addresses; from now on, other entries may be removed."""
        ...

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Delete the endpoint's entry from cilium_lxc."""
        ...

    def configs(self) -> list[int]:
        """Return the link indexes in hive_endpoints."""
        ...

    def drop_config(self, ifindex: int) -> None:
        """Delete a link index from hive_endpoints."""
        ...

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Open the policy maps of these endpoints, so that their adoption does not wait."""
        ...

    async def sweep_policies(self) -> None:
        """Remove the policy maps that were not adopted."""
        ...


class PreviousAgent(Protocol):
    """The interface to programs of Cilium's agent, on a node migrated from it."""

    def release_previous(self, keep: Collection[int]) -> None:
        """Detach its programs from all interfaces except ``keep`` (indexes). Raises OSError."""
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
    """Implements :class:`~cells.endpoint.restore.interfaces.LinkEvents` by rtnetlink."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Subscribe without parsing messages, as links are listed again.

        The callable raises OSError if the socket overran.
        """
        return subscribed(_RTMGRP_LINK, REMOVED)


# The maps as the previous agent left them.

_ifindex: Final = struct.Struct("<I")


class KernelStaleMaps:
    """Implements :class:`~cells.endpoint.restore.interfaces.StaleMaps` by the node's maps."""

    def __init__(self, maps: Maps, local: LocalAddresses, policies: PolicyMaps) -> None:
        self._maps = maps
        self._local = local
        self._claimed = local.table.initializer("endpoint-restore")
        self._policies = policies

    def addresses(self) -> list[LxcRow]:
        """Return the entries of cilium_lxc."""
        rows = {row.ip: row.value for row in self._local.table.all()} | dict(self._local.leftovers)
        return [
            LxcRow(ip, row.endpoint_id, row.ifindex, row.identity, row.is_host) for ip, row in rows.items()
        ]

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        """Claim the previous agent's entries of these addresses."""
        self._local.adopt(ips)
        self._claimed.done()

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Delete the endpoint's entry from cilium_lxc."""
        self._local.drop_endpoint(ip, endpoint_id)

    def configs(self) -> list[int]:
        """Return the link indexes in hive_endpoints."""
        return [_ifindex.unpack(key)[0] for key, _ in self._maps.endpoints.items()]

    def drop_config(self, ifindex: int) -> None:
        """Delete a link index from hive_endpoints."""
        self._maps.endpoints.delete(_ifindex.pack(ifindex))

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Open the policy maps, and recreate missing ones."""
        await self._policies.prepare(endpoint_ids)

    async def sweep_policies(self) -> None:
        """Remove the policy maps that were not adopted."""
        await self._policies.sweep()
