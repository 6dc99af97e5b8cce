"""What restore touches outside, in its own words, so that a fake takes a line."""

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
        """Every link; raises OSError."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete these links; raises OSError."""
        ...


class LinkEvents(Protocol):
    """News of links that go."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """While it is open, the callable waits until a link was removed since its last call.

        It raises OSError when news may have been missed: open it again and look.
        """
        ...


class RestoreAddresses(Protocol):
    """The address allocator."""

    def covers(self, ip: IPAddress) -> bool:
        """Whether the address could be handed out: its family is on, and it is in the node's range."""
        ...

    @property
    def default_pool(self) -> str:
        """The pool of addresses for saved state without one."""
        ...

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> object:
        """Claim exactly this address; raises IpamError."""
        ...

    def hold(self, ip: IPAddress, owner: str) -> None:
        """An address in use that is in no range: a range that comes must not hand it out."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give it back."""
        ...


class LxcRow(msgspec.Struct, frozen=True):
    """A row of cilium_lxc: an address and where the datapath delivers it."""

    ip: IPAddress
    endpoint_id: int
    ifindex: int
    identity: int
    is_host: bool


class StaleMaps(Protocol):
    """The maps as the last agent left them. Calls raise OSError; removing what is not there does nothing."""

    def addresses(self) -> list[LxcRow]:
        """The rows of cilium_lxc."""
        ...

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        """Endpoints keep these addresses; rows of others may go from now on."""
        ...

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Remove the endpoint's row from cilium_lxc."""
        ...

    def configs(self) -> list[int]:
        """The link indexes in hive_endpoints."""
        ...

    def drop_config(self, ifindex: int) -> None:
        """Remove a link index from hive_endpoints."""
        ...

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Make sure the policy maps of these endpoints can be taken over without waiting."""
        ...

    async def sweep_policies(self) -> None:
        """Remove the policy maps that were not taken over."""
        ...


class PreviousAgent(Protocol):
    """What Cilium's own agent left in force on a node that was moved to this one."""

    def release_previous(self, keep: Collection[int]) -> None:
        """Take its programs off every interface but of ``keep``, by index; raises OSError."""
        ...


# News from the kernel that a link was removed.

_RTMGRP_LINK: Final = 0x1
_RTM_DELLINK: Final = 17

REMOVED: Final = (
    (LOAD_HALF, 0, 0, TYPE),
    (EQUAL, 0, 1, socket.htons(_RTM_DELLINK)),
    (RETURN, 0, 0, PASS),
    (RETURN, 0, 0, DROP),
)


class KernelLinkEvents:
    """The real :class:`~cells.endpoint.restore.edges.LinkEvents`."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """The event's contents are not read: the links are listed again. OSError when the socket overran."""
        return subscribed(_RTMGRP_LINK, REMOVED)


# The maps as the last agent left them.

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
        """Claim for endpoints what an earlier agent wrote of these addresses."""
        self._local.keep(ips)
        self._claimed.done()

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        """Remove the endpoint's row from cilium_lxc."""
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
        """Remove the policy maps that were not taken over."""
        await self._policies.sweep()
