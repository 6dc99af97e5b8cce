"""What restore touches outside, in its own words, so that a fake takes a line.

For:   RestoredEndpoints.   Needs: nothing.   Gives: RestoreLinks, RestoreAddresses, LeftMaps.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Protocol

from cells.netlink import LinkInfo


class RestoreLinks(Protocol):
    """The links of the node."""

    def links(self) -> Sequence[LinkInfo]:
        """Every link; raises OSError."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete these links; raises OSError."""
        ...


class RestoreAddresses(Protocol):
    """The address allocator."""

    @property
    def default_pool(self) -> str:
        """The pool of addresses whose saved state names none."""
        ...

    def allocate(self, ip: IPv4Address, owner: str, pool: str) -> object:
        """Claim exactly this address; raises IpamError."""
        ...

    def release(self, ip: IPv4Address, pool: str) -> None:
        """Give it back."""
        ...


@dataclass(frozen=True, slots=True)
class LeftAddress:
    """A row of cilium_lxc: an address and where the datapath delivers it."""

    ipv4: IPv4Address
    endpoint_id: int
    ifindex: int
    identity: int
    is_host: bool


class LeftMaps(Protocol):
    """The maps as the last agent left them. Calls raise OSError; removing what is not there does nothing."""

    def addresses(self) -> list[LeftAddress]:
        """The IPv4 rows of cilium_lxc."""
        ...

    def drop_address(self, ipv4: IPv4Address) -> None:
        """Remove the address from cilium_lxc."""
        ...

    def configs(self) -> list[int]:
        """The link indexes in hive_endpoints."""
        ...

    def drop_config(self, ifindex: int) -> None:
        """Remove a link index from hive_endpoints."""
        ...

    def local_identities(self) -> dict[IPv4Address, int]:
        """The addresses of this node's endpoints in cilium_ipcache, and their identities."""
        ...

    def drop_identity(self, ipv4: IPv4Address) -> None:
        """Remove a single address from cilium_ipcache."""
        ...

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        """Make sure the policy maps of these endpoints can be taken over without waiting."""
        ...

    async def sweep_policies(self) -> None:
        """Remove the policy maps nobody has taken over."""
        ...
