"""Links of the node: create, configure and delete veth pairs, attach programs, set addresses and routes.

HostLinks works on the agent's own network namespace; the CNI server, the router and endpoint restore use it.
Functions that take no HostLinks open their own socket, for worker threads.
"""

import errno
import os
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from math import inf

import anyio
import anyio.to_thread
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from cells.netlink import messages as m
from cells.netlink.connection import AsyncExchange, Connection, NetlinkError, connected, open_socket
from cells.netlink.messages import IPAddress, IPInterface, IPNetwork, OffloadLimits, VethPair
from cells.netlink.rows import (
    IndexReader,
    LinkInfo,
    LinkPrograms,
    Offloads,
    RouteInfo,
    XdpPrograms,
    is_link_local6,
    read_address,
    read_link,
    read_name,
    read_offloads,
    read_program,
    read_route,
    read_xdp,
)
from cells.netlink.wire import Request
from lifecycle import Lifecycle, NotStartedError

__all__ = [
    "CreatedLink",
    "HostLinks",
    "all_routes",
    "detach_xdp",
    "is_present",
    "programs_of",
    "routes_over",
    "xdp_of",
]


# Batched deletion of links.
#
# Deleting one link waits 14 to 20 ms for RCU; deleting a group of fifty waits hardly longer. So links are
# queued while an earlier deletion runs, put into a new link group (IFLA_GROUP), and deleted as a group in a
# worker thread.

_BATCH = 100  # requests per datagram: even if all fail, their errors fit the socket's receive buffer


class _DeleteRequest:
    """The links that one caller of reap() wants deleted, and the errors."""

    def __init__(self, ifindexes: frozenset[int]) -> None:
        self.ifindexes = ifindexes
        self.done = anyio.Event()
        self.failures: list[NetlinkError] = []


class LinkReaper:
    """Delete links in batches while :meth:`running` is open; queued links are still deleted after it."""

    def __init__(self) -> None:
        self._queue: MemoryObjectSendStream[_DeleteRequest] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delete the links that callers pass to :meth:`reap`, until the block ends."""
        send, receive = anyio.create_memory_object_stream[_DeleteRequest](inf)
        async with receive, anyio.create_task_group() as tasks:
            tasks.start_soon(self._work, receive)
            with send:
                self._queue = send
                try:
                    yield
                finally:
                    self._queue = None

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete these links and return once they no longer exist; missing links are ignored.

        Cancelling the caller ends its wait, but the links are still deleted. Raises NetlinkError for the
        first link that the kernel refused to delete.
        """
        if self._queue is None:
            raise NotStartedError("links cannot be deleted: the netlink hook has not started, or has stopped")
        request = _DeleteRequest(frozenset(ifindexes))
        if not request.ifindexes:
            return
        self._queue.send_nowait(request)
        await request.done.wait()
        if request.failures:
            raise request.failures[0]

    async def _work(self, receive: MemoryObjectReceiveStream[_DeleteRequest]) -> None:
        requests: list[_DeleteRequest] = []
        try:
            async for first in receive:
                requests = [first]
                while receive.statistics().current_buffer_used:
                    requests.append(receive.receive_nowait())
                ifindexes = frozenset().union(*(request.ifindexes for request in requests))
                failures = await anyio.to_thread.run_sync(delete_links, ifindexes)
                for request in requests:
                    request.failures = [failures[each] for each in request.ifindexes if each in failures]
                    request.done.set()
        finally:  # cancelled: no waiter may wait for ever
            while receive.statistics().current_buffer_used:
                requests.append(receive.receive_nowait())
            for request in requests:
                if not request.done.is_set():
                    request.failures = [NetlinkError(errno.ECANCELED, "delete links")]
                    request.done.set()


def delete_links(ifindexes: Collection[int]) -> dict[int, NetlinkError]:
    """Delete links of this namespace over a new socket, blocking; return the errors by index."""
    try:
        with connected() as connection:
            if len(ifindexes) > 1 and _delete_together(connection, list(ifindexes)):
                return {}
            return _delete_each(connection, ifindexes)
    except OSError as error:
        failure = NetlinkError(error.errno or errno.EIO, "open a netlink socket to delete links")
        return dict.fromkeys(ifindexes, failure)


def _delete_together(connection: Connection, ifindexes: list[int]) -> bool:
    """Delete the links as one link group; return False on failure, so that they are deleted singly.

    The group number is random out of 2**30 and used for this one deletion, so that no foreign link and no
    link of another reap() is in the group.
    """
    group = 1 << 30 | secrets.randbits(30)
    try:
        for start in range(0, len(ifindexes), _BATCH):
            connection.run(*(m.set_group(each, group) for each in ifindexes[start : start + _BATCH]))
        connection.run(m.delete_group(group))
    except NetlinkError:
        return False
    return True


def _delete_each(connection: Connection, ifindexes: Collection[int]) -> dict[int, NetlinkError]:
    failures: dict[int, NetlinkError] = {}
    for ifindex in ifindexes:
        try:
            connection.run(m.delete_link(ifindex))
        except NetlinkError as error:
            failures[ifindex] = error
    return failures


class CreatedLink(msgspec.Struct, frozen=True):
    """The interface indexes of a new veth pair, each in the namespace of its end."""

    host_ifindex: int
    pod_ifindex: int


class HostLinks:
    """Links of the node's network namespace. Methods raise NetlinkError when the kernel refuses."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._opened: Connection | None = None
        self._async_exchange: AsyncExchange | None = None
        self._reaper = LinkReaper()
        self._indexes = IndexReader()
        lifecycle.enter("netlink", self.opened)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the sockets and run the link reaper inside the block."""
        fd = open_socket()
        try:
            exchange = AsyncExchange()
        except BaseException:
            os.close(fd)
            raise
        self._opened, self._async_exchange = Connection(fd), exchange
        try:
            async with self._reaper.running():
                yield
        finally:
            self._opened = self._async_exchange = None
            exchange.close()
            os.close(fd)

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            raise _closed()
        return self._opened

    @property
    def _exchange(self) -> AsyncExchange:
        if self._async_exchange is None:
            raise _closed()
        return self._async_exchange

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a veth pair with the peer in the pod's namespace; both ends are down.

        Raises NetlinkError EEXIST if either name is taken. The same datagram requests the new indexes.
        """
        replies = self._connection.run(m.create_veth(pair), m.get_link(pair.host_name))
        return CreatedLink(*self._indexes.read(replies[0]))

    def start_create_veth(self, pair: VethPair) -> None:
        """Start create_veth() in a C thread; call finish_create_veth() before the next start.

        The namespace's descriptor must stay open until then.
        """
        self._exchange.start(m.create_veth(pair), m.get_link(pair.host_name))

    def finish_create_veth(self) -> CreatedLink:
        """Wait for the pair from start_create_veth(); raises what create_veth() raises."""
        return CreatedLink(*self._indexes.read(self._exchange.finish()[0]))

    def activate(self, ifindex: int, alias: str) -> None:
        """Disable reverse path filtering, set the alias and bring the link up, in one message."""
        self._connection.run(m.activate_link(ifindex, alias))

    def sync_carrier(self, ifindex: int) -> None:
        """Make the kernel apply a carrier change, so that the link can transmit at once.

        After the peer comes up, the kernel activates the link's qdisc later, from a work queue, and drops
        packets until then. A link query makes it process pending events first (net/core/link_watch.c, since
        6.8).
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
        """Attach or replace direct-action BPF filters (handle 1, priority 1) at clsact.

        None leaves that direction as it is.
        """
        batch = [m.add_clsact(ifindex)]
        if ingress_fd is not None:
            batch.append(m.replace_filter(ifindex, m.TC_H_INGRESS, ingress_fd, ingress_name))
        if egress_fd is not None:
            batch.append(m.replace_filter(ifindex, m.TC_H_EGRESS, egress_fd, egress_name))
        self._connection.run(*batch)

    def detach(self, ifindex: int, *, ingress: bool, egress: bool) -> None:
        """Remove the filters of :meth:`attach_clsact` in these directions; missing ones are ignored."""
        parents = [*([m.TC_H_INGRESS] if ingress else []), *([m.TC_H_EGRESS] if egress else [])]
        if parents:
            self._connection.run(*(m.delete_filter(ifindex, parent) for parent in parents))

    def set_xdp(self, ifindex: int, program_fd: int, *, generic: bool, instead_of: int | None) -> None:
        """Attach an XDP program in driver or ``generic`` mode; -1 detaches the current one.

        ``instead_of`` is a descriptor of the program expected to be attached, None for none. Raises
        NetlinkError EEXIST if another one is attached.
        """
        self._connection.run(m.set_xdp(ifindex, program_fd, generic=generic, instead_of=instead_of))

    def xdp(self, ifindex: int) -> XdpPrograms:
        """Return the XDP programs of a link. Raises NetlinkError ENODEV if it does not exist."""
        return read_xdp(self._connection.run(m.get_link_at(ifindex))[-1])

    def find(self, name: str) -> LinkInfo | None:
        """Return the link of this name, or None."""
        return self._link(m.get_link(name))

    def at(self, ifindex: int) -> LinkInfo | None:
        """Return the link with this index, or None."""
        return self._link(m.get_link_at(ifindex))

    def _link(self, request: Request) -> LinkInfo | None:
        try:
            return read_link(self._connection.run(request)[-1])
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def offloads(self, ifindex: int) -> Offloads:
        """Return the GSO and GRO limits of a link. Raises NetlinkError ENODEV if it does not exist."""
        return read_offloads(self._connection.run(m.get_link_at(ifindex))[-1])

    def set_offloads(self, ifindex: int, limits: OffloadLimits) -> None:
        """Set the GSO and GRO limits of a link. EINVAL: the driver does not support packets that large."""
        self._connection.run(m.set_offloads(ifindex, limits))

    def links(self, without: tuple[str, ...] = ()) -> list[LinkInfo]:
        """Return all links of the namespace, except those with names that start with one of ``without``."""
        rows = self._connection.dump(m.dump_links())
        return [read_link(row) for row in rows if not (without and read_name(row).startswith(without))]

    def addresses(self) -> dict[int, list[IPInterface]]:
        """Return the addresses of each link, by index, in the kernel's order, IPv4 first.

        IPv6 link-local addresses are left out: every pod's link has one.
        """
        found: dict[int, list[IPInterface]] = {}
        for row in self._connection.dump(m.dump_addresses()):
            if is_link_local6(row):
                continue
            if (read := read_address(row)) is not None:
                found.setdefault(read[0], []).append(read[1])
        return found

    async def routes(self, ifindex: int) -> list[RouteInfo]:
        """Return the unicast routes of the main table over a link, in a worker thread: there may be many."""
        return await anyio.to_thread.run_sync(routes_over, ifindex)

    def programs(self, ifindex: int) -> LinkPrograms:
        """Return the programs at the hooks of :meth:`attach_clsact`; none for a missing link."""
        return read_programs(self._connection, ifindex)

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """Set MTU, queue length 1000 and NOARP, and bring the link up; idempotent."""
        self._connection.run(m.set_device(ifindex, name, mtu))

    def set_mtu(self, ifindex: int, mtu: int) -> None:
        """Set the MTU of a link. Raises NetlinkError ENODEV if it does not exist."""
        self._connection.run(m.set_mtu(ifindex, mtu))

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Add an address to a link as /32 or /128. Raises NetlinkError EEXIST if the link has it."""
        self._connection.run(m.add_address(ifindex, name, address))

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Remove an address from a link, and the host route to it; missing ones are ignored."""
        self._connection.run(
            m.delete_address(ifindex, name, address), m.delete_route(ifindex, m.network_of(address.ip))
        )

    def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """Add or replace a route of the main table, through ``gateway`` or on-link.

        ``source`` is the preferred source address of packets that the node sends on it.
        """
        self._connection.run(m.add_route(ifindex, destination, via=gateway, source=source, replace=True))

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """Add a host route and a permanent neighbour entry for a pod's address on its link.

        Without the neighbour entry the pod's first packets would be lost: a new link has no IPv6 address to
        send neighbour solicitations from for a second or two. The kernel removes both with the link.
        """
        destination = m.network_of(address)
        self._connection.run(
            m.set_neighbour(ifindex, address, mac), m.add_route(ifindex, destination, replace=True)
        )

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        """Remove a route of the main table over a link; a missing one is ignored."""
        self._connection.run(m.delete_route(ifindex, network))

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete links off the event loop, batched with those of other callers; see :class:`LinkReaper`."""
        await self._reaper.reap(ifindexes)


def _closed() -> NotStartedError:
    return NotStartedError("the netlink socket is not open: its hook has not started, or has stopped")


def read_programs(connection: Connection, ifindex: int) -> LinkPrograms:
    """Return the programs of one link."""
    return LinkPrograms(
        *(
            read_program(connection.dump(m.dump_filters(ifindex, parent)))
            for parent in (m.TC_H_INGRESS, m.TC_H_EGRESS)
        )
    )


def is_present(ifindex: int, name: str) -> bool:
    """Return whether the link with this index has this name: the kernel may reuse an index."""
    try:
        return socket.if_indextoname(ifindex) == name
    except OSError:
        return False


def routes_over(ifindex: int) -> list[RouteInfo]:
    """Return the unicast routes of the main table over one link. For a worker thread."""
    return [row for row in all_routes(ifindex) if row.ifindex == ifindex]


def all_routes(ifindex: int = 0) -> list[RouteInfo]:
    """Return the unicast routes of the main table; ``ifindex`` lets the kernel filter by link."""
    with connected(strict=True) as connection:
        rows = map(read_route, connection.dump(m.dump_routes(socket.AF_UNSPEC, ifindex)))
        return [row for row in rows if row is not None]


def programs_of(ifindexes: Iterable[int]) -> dict[int, LinkPrograms]:
    """Return the programs of many links: 0.1 ms per link, for a worker thread.

    Raises NetlinkError, and OSError if no socket can be opened.
    """
    with connected() as connection:
        return {ifindex: read_programs(connection, ifindex) for ifindex in ifindexes}


def xdp_of(ifindex: int) -> XdpPrograms:
    """Return the XDP programs of a link, over a new socket. Raises NetlinkError."""
    with connected() as connection:
        return read_xdp(connection.run(m.get_link_at(ifindex))[-1])


def detach_xdp(ifindex: int, program_fd: int, *, generic: bool) -> None:
    """Detach this XDP program from a link, over a new socket. Raises NetlinkError."""
    with connected() as connection:
        connection.run(m.set_xdp(ifindex, -1, generic=generic, instead_of=program_fd))
