"""The node's side of pods: veth pairs, their activation, their programs, their end.

Needs: Lifecycle (its hook opens the socket).   Gives: HostLinks, VethPair, CreatedLink.
Everything but reap() is one synchronous exchange with the kernel of 0.02 to 0.3 ms.
"""

import errno
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from cells.netlink import messages as m
from cells.netlink.connection import Connection, NetlinkError, open_socket
from cells.netlink.messages import IPAddress, IPInterface, IPNetwork, VethPair
from cells.netlink.reaper import Reaper
from cells.netlink.rows import LinkInfo, read_address, read_indexes, read_link, read_name, read_route
from lifecycle import Lifecycle, NotStartedError


@dataclass(frozen=True, slots=True)
class CreatedLink:
    """Indexes of a pair, each in the namespace of its end."""

    host_ifindex: int
    pod_ifindex: int


class HostLinks:
    """Links of the node's network namespace. Methods raise NetlinkError when the kernel refuses."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._opened: Connection | None = None
        self._reaper = Reaper()
        lifecycle.enter("netlink", self.opened)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The socket and the reaper, open inside."""
        fd = open_socket()
        self._opened = Connection(fd)
        try:
            async with self._reaper.running():
                yield
        finally:
            self._opened = None
            os.close(fd)

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            raise NotStartedError("the netlink socket is not open: its hook has not started, or has stopped")
        return self._opened

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a pair, its peer in the pod's namespace at once; both ends are down.

        EEXIST: either name is taken. The indexes are asked for in the same datagram.
        """
        replies = self._connection.run(
            m.create_veth(pair),
            m.get_link(pair.host_name),
        )
        return CreatedLink(*read_indexes(replies[0]))

    def activate(self, ifindex: int, alias: str) -> None:
        """Turn reverse path filtering off, set the alias and bring the link up, in one message."""
        self._connection.run(m.activate_link(ifindex, alias))

    def sync_carrier(self, ifindex: int) -> None:
        """Let the link send from now on, when its other end has just come up.

        The kernel gives a link its queue some time after its carrier, from a work queue, and drops what is
        sent until then; being asked for the link, it does so first (net/core/link_watch.c, since 6.8).
        """
        self._connection.run(m.sync_carrier(ifindex))

    def attach_clsact(
        self,
        ifindex: int,
        ingress_fd: int | None,
        egress_fd: int | None,
        ingress_name: str = "",
        egress_name: str = "",
    ) -> None:
        """Attach BPF programs as direct-action filters (handle 1, priority 1), replacing what is there.

        None leaves that direction as it is.
        """
        batch = [m.add_clsact(ifindex)]
        if ingress_fd is not None:
            batch.append(m.replace_filter(ifindex, m.TC_H_INGRESS, ingress_fd, ingress_name))
        if egress_fd is not None:
            batch.append(m.replace_filter(ifindex, m.TC_H_EGRESS, egress_fd, egress_name))
        self._connection.run(*batch)

    def find(self, name: str) -> LinkInfo | None:
        """The link of that name, or None."""
        try:
            replies = self._connection.run(m.get_link(name))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        return read_link(replies[-1])

    def at(self, ifindex: int) -> LinkInfo | None:
        """The link with that index, or None."""
        try:
            replies = self._connection.run(m.get_link_at(ifindex))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        return read_link(replies[-1])

    def links(self, without: tuple[str, ...] = ()) -> list[LinkInfo]:
        """Every link of the namespace, but those whose names begin with one of ``without``."""
        rows = self._connection.dump(m.dump_links())
        return [read_link(row) for row in rows if not (without and read_name(row).startswith(without))]

    def addresses(self) -> dict[int, list[IPInterface]]:
        """The addresses of every link that has some, by its index, in the kernel's order, IPv4 first."""
        found: dict[int, list[IPInterface]] = {}
        for row in self._connection.dump(m.dump_addresses()):
            if (read := read_address(row)) is not None:
                found.setdefault(read[0], []).append(read[1])
        return found

    def routes(self, ifindex: int) -> list[IPNetwork]:
        """Destinations of the unicast routes over a link, in the main table."""
        rows = map(read_route, self._connection.dump(m.dump_routes(socket.AF_UNSPEC)))
        return [row[1] for row in rows if row is not None and row[0] == ifindex]

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """Make a link a node device: MTU, queue length 1000, no ARP, up. Repeating it changes nothing."""
        self._connection.run(m.set_device(ifindex, name, mtu))

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Give a link an address of its own, as a /32 or /128. EEXIST when it has it."""
        self._connection.run(m.add_address(ifindex, name, address))

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Take an address off a link, and the route to it alone; what is gone is fine."""
        self._connection.run(
            m.delete_address(ifindex, name, address), m.delete_route(ifindex, m.network_of(address.ip))
        )

    def set_routes(self, ifindex: int, gateway: IPAddress, network: IPNetwork) -> None:
        """``gateway`` on the link, and ``network`` through it and with it as source; equal routes stay.

        IPv6 takes no gateway that is an address of this node ("Gateway can not be a local address"): there
        the network is on the link, and the address has its route from the kernel.
        """
        if isinstance(gateway, IPv4Address):
            self._connection.run(
                m.add_route(ifindex, IPv4Network(gateway), replace=True),
                m.add_route(ifindex, network, via=gateway, source=gateway, replace=True),
            )
        else:
            self._connection.run(m.add_route(ifindex, network, source=gateway, replace=True))

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        """Remove a route of the main table over a link; one that is gone is fine."""
        self._connection.run(m.delete_route(ifindex, network))

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete links off the loop, together with those of other callers; see :class:`Reaper`."""
        await self._reaper.reap(ifindexes)
