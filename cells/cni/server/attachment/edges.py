"""What the CNI server needs of other cells, in its own words, so that a test's fake takes a line.

Needs: nothing.   Gives: Links, PodEnd, Addresses, Flows, Endpoints, PolicyPool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from cells.endpoint import Endpoint, EndpointRequest, NewEndpoint, State
from cells.ipam import Allocation, Family, IPAddress
from cells.node.netlink import CreatedLink, LinkInfo, VethPair


class Links(Protocol):
    """The node's links; cells.node.netlink.HostLinks. Methods raise NetlinkError."""

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a pair, the peer in the pod at once."""
        ...

    def begin_veth(self, pair: VethPair) -> None:
        """Begin with that in the background; one at a time."""
        ...

    def created_veth(self) -> CreatedLink:
        """Wait for the pair that was begun."""
        ...

    def activate(self, ifindex: int, alias: str) -> None:
        """Alias and up."""
        ...

    def sync_carrier(self, ifindex: int) -> None:
        """Let the link send at once after its other end came up."""
        ...

    def find(self, name: str) -> LinkInfo | None:
        """The link of that name."""
        ...

    def at(self, ifindex: int) -> LinkInfo | None:
        """The link with that index."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete, off the loop; returns when they are gone."""
        ...


class PodEnd(Protocol):
    """One pod's links; cells.node.netlink.PodLink. Methods raise NetlinkError."""

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPAddress],
        gateways: Sequence[IPAddress],
        mtu: int,
    ) -> None:
        """Up, addresses, routes through the gateways (one per address)."""
        ...

    def addresses(self, name: str) -> Collection[IPAddress] | None:
        """Those of the link; None when there is no such link."""
        ...

    def links(self) -> list[LinkInfo]:
        """Every link of the pod."""
        ...

    def addresses_of(self, ifindex: int) -> list[IPAddress]:
        """Those of the link, the first one first."""
        ...

    def set_mac(self, ifindex: int, name: str, mac: bytes) -> None:
        """Give the link another MAC address."""
        ...

    def set_route_mtu(self, mtu: int) -> None:
        """Give all routes this MTU."""
        ...

    def delete(self, name: str) -> bool:
        """Delete, blocking; False when there is none."""
        ...


class Addresses(Protocol):
    """The address allocator; cells.ipam.Ipam. Methods raise IpamError."""

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """A free address of each family, or of this one."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give it back."""
        ...


class Flows(Protocol):
    """What conntrack knows of pods that have gone; cells.endpoint.Endpoints."""

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once nothing of these addresses is left."""
        ...


class Endpoints(Protocol):
    """The endpoints; cells.endpoint.Endpoints. Methods raise EndpointError."""

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """The first half of making it; raises PoolEmpty when a policy map must be waited for."""
        ...

    async def identify(self, new: NewEndpoint) -> None:
        """Wait for its identity, all or nothing."""
        ...

    def complete(self, new: NewEndpoint) -> Endpoint:
        """The second half, all or nothing."""
        ...

    def route(self, endpoint: Endpoint) -> None:
        """The routes to the pod, where it has its own; raises OSError."""
        ...

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Remove it; what went wrong on the way."""
        ...

    def lookup(self, id_text: str) -> Endpoint | None:
        """By any id the API knows."""
        ...

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        """By container and interface."""
        ...

    def by_container(self, container_id: str) -> list[Endpoint]:
        """All of a container."""
        ...

    def all(self) -> list[Endpoint]:
        """Everyone."""
        ...

    def shown_state(self, endpoint: Endpoint) -> State:
        """Its state, and whether something is wrong with it."""
        ...


class PolicyPool(Protocol):
    """The prepared policy maps; cells.maps.PolicyMaps."""

    async def ready(self) -> None:
        """Return once one is prepared; raises HiveError when there will be none."""
        ...
