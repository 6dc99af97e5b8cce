"""What an endpoint is in the kernel: rows in maps, and a program on its link.

For:   Endpoints and endpoint restore.   Needs: nothing (the real maps are in cells.endpoint.kernel.rows).
Gives: EndpointMaps, EndpointPrograms, EndpointRoutes, EndpointAddresses: edges, in the words of this cell.
"""

from collections.abc import Collection
from typing import Protocol

from cells.endpoint.table.model import Endpoint, IPAddress


class EndpointMaps(Protocol):
    """The maps that say what the datapath does with an endpoint's packets. All calls are synchronous."""

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Row of the link's index in hive_endpoints; not written when it is right already.

        ``any_source``: packets from addresses other than the endpoint's own go through.
        """
        ...

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the row; it need not be there."""
        ...

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Rows of the addresses in cilium_lxc; not written where they are right already."""
        ...

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Remove the rows, but for those no longer this endpoint's (a host address, another endpoint)."""
        ...

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Remove the conntrack entries from and to these addresses; how many there were."""
        ...


class EndpointPrograms(Protocol):
    """The programs on an endpoint's link."""

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        """Attach to the host side of the link, replacing what is there; raises OSError.

        ``egress_prog``: to what it sends to the pod, too.
        """
        ...


class EndpointRoutes(Protocol):
    """The node's routes over endpoints' links."""

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """To the pod's address, at its MAC address; raises OSError, also for a link that is down."""
        ...


class EndpointAddresses(Protocol):
    """The address allocator, as far as an endpoint's life touches it."""

    @property
    def default_pool(self) -> str:
        """The pool of addresses whose request names none."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give the address back."""
        ...

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        """The address is in use now: it no longer expires. Raises when no such timer runs."""
        ...
