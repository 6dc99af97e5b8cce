"""The node's side of pods: veth pairs, their activation, their programs, their end."""

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
from cells.netlink.connection import Ahead, Connection, NetlinkError, connected, open_socket
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
from lifecycle import Lifecycle, NotStartedError

__all__ = [
    "CreatedLink",
    "HostLinks",
    "all_routes",
    "is_present",
    "programs_of",
    "routes_over",
    "take_off_xdp",
    "xdp_of",
]


# Deletes links, many at once.
#
# Deleting one link waits 14 to 20 ms for RCU; deleting a group of fifty waits hardly longer. So links to go
# are collected while an earlier deletion runs, put into a link group of their own, and deleted as a
# group, in a worker thread on a socket of its own.

_BATCH = 100  # requests a datagram: their errors, if all fail, still fit the socket's receive buffer


class _Ticket:
    """One caller's links, and what became of them."""

    def __init__(self, ifindexes: frozenset[int]) -> None:
        self.ifindexes = ifindexes
        self.done = anyio.Event()
        self.failures: list[NetlinkError] = []


class Reaper:
    """Runs while :meth:`running` is open; what was handed in before it ends is still deleted."""

    def __init__(self) -> None:
        self._queue: MemoryObjectSendStream[_Ticket] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delete what :meth:`reap` hands in, until left."""
        send, receive = anyio.create_memory_object_stream[_Ticket](inf)
        async with receive, anyio.create_task_group() as tasks:
            tasks.start_soon(self._work, receive)
            with send:
                self._queue = send
                try:
                    yield
                finally:
                    self._queue = None

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete these links and return once they no longer exist; one that is removed already is fine.

        A cancelled caller stops waiting, its links go all the same.
        Raises NetlinkError for the first that the kernel would not delete.
        """
        if self._queue is None:
            raise NotStartedError("links cannot be deleted: the netlink hook has not started, or has stopped")
        ticket = _Ticket(frozenset(ifindexes))
        if not ticket.ifindexes:
            return
        self._queue.send_nowait(ticket)
        await ticket.done.wait()
        if ticket.failures:
            raise ticket.failures[0]

    async def _work(self, receive: MemoryObjectReceiveStream[_Ticket]) -> None:
        tickets: list[_Ticket] = []
        try:
            async for first in receive:
                tickets = [first]
                while receive.statistics().current_buffer_used:
                    tickets.append(receive.receive_nowait())
                ifindexes = frozenset().union(*(ticket.ifindexes for ticket in tickets))
                failures = await anyio.to_thread.run_sync(delete_links, ifindexes)
                for ticket in tickets:
                    ticket.failures = [failures[each] for each in ticket.ifindexes if each in failures]
                    ticket.done.set()
        finally:  # cancelled: no waiter may wait for ever
            while receive.statistics().current_buffer_used:
                tickets.append(receive.receive_nowait())
            for ticket in tickets:
                if not ticket.done.is_set():
                    ticket.failures = [NetlinkError(errno.ECANCELED, "delete links")]
                    ticket.done.set()


def delete_links(ifindexes: Collection[int]) -> dict[int, NetlinkError]:
    """Delete links of this namespace on a socket of its own, blocking; returns what failed, by index."""
    try:
        with connected() as connection:
            if len(ifindexes) > 1 and _delete_together(connection, list(ifindexes)):
                return {}
            return _delete_each(connection, ifindexes)
    except OSError as error:
        failure = NetlinkError(error.errno or errno.EIO, "open a netlink socket to delete links")
        return dict.fromkeys(ifindexes, failure)


def _delete_together(connection: Connection, ifindexes: list[int]) -> bool:
    """Delete the links as one group; False when something was in the way, and they go one by one.

    The group's number is random out of 2**30 and lives for this one deletion: it has no other links, and no
    other reap's, are ever in it.
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
    """Indexes of a pair, each in the namespace of its end."""

    host_ifindex: int
    pod_ifindex: int


class HostLinks:
    """Links of the node's network namespace. Methods raise NetlinkError when the kernel refuses."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._opened: Connection | None = None
        self._ahead: Ahead | None = None
        self._reaper = Reaper()
        self._indexes = IndexReader()
        lifecycle.enter("netlink", self.opened)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The sockets and the reaper, open inside."""
        fd = open_socket()
        try:
            ahead = Ahead()
        except BaseException:
            os.close(fd)
            raise
        self._opened, self._ahead = Connection(fd), ahead
        try:
            async with self._reaper.running():
                yield
        finally:
            self._opened = self._ahead = None
            ahead.close()
            os.close(fd)

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            raise _closed()
        return self._opened

    @property
    def _other(self) -> Ahead:
        if self._ahead is None:
            raise _closed()
        return self._ahead

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a pair, its peer in the pod's namespace at once; both ends are down.

        EEXIST: either name is taken. The indexes are asked for in the same datagram.
        """
        replies = self._connection.run(m.create_veth(pair), m.get_link(pair.host_name))
        return CreatedLink(*self._indexes.read(replies[0]))

    def begin_veth(self, pair: VethPair) -> None:
        """Begin with what create_veth() does, in a thread; one at a time, so fetch created_veth() first.

        The namespace's descriptor must stay open until then.
        """
        self._other.start(m.create_veth(pair), m.get_link(pair.host_name))

    def created_veth(self) -> CreatedLink:
        """The pair that was started, waited for; raises what create_veth() does."""
        return CreatedLink(*self._indexes.read(self._other.finish()[0]))

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

    def detach(self, ifindex: int, *, ingress: bool, egress: bool) -> None:
        """Take off what :meth:`attach_clsact` attached, of either direction; a missing one is fine."""
        parents = [*([m.TC_H_INGRESS] if ingress else []), *([m.TC_H_EGRESS] if egress else [])]
        if parents:
            self._connection.run(*(m.delete_filter(ifindex, parent) for parent in parents))

    def set_xdp(self, ifindex: int, program_fd: int, *, generic: bool, instead_of: int | None) -> None:
        """Attach an XDP program, in the driver or ``generic``; -1 takes off what is there.

        ``instead_of`` is a descriptor of what is there, None for nothing; EEXIST when that is not so.
        """
        self._connection.run(m.set_xdp(ifindex, program_fd, generic=generic, instead_of=instead_of))

    def xdp(self, ifindex: int) -> XdpPrograms:
        """The XDP programs of a link; ENODEV when it does not exist."""
        return read_xdp(self._connection.run(m.get_link_at(ifindex))[-1])

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

    def offloads(self, ifindex: int) -> Offloads:
        """The limits of a link's GSO and GRO. ENODEV: it does not exist."""
        return read_offloads(self._connection.run(m.get_link_at(ifindex))[-1])

    def set_offloads(self, ifindex: int, limits: OffloadLimits) -> None:
        """Give a link other limits of GSO and GRO. EINVAL: its driver takes no packets that large."""
        self._connection.run(m.set_offloads(ifindex, limits))

    def links(self, without: tuple[str, ...] = ()) -> list[LinkInfo]:
        """Every link of the namespace, but those with names that begin with one of ``without``."""
        rows = self._connection.dump(m.dump_links())
        return [read_link(row) for row in rows if not (without and read_name(row).startswith(without))]

    def addresses(self) -> dict[int, list[IPInterface]]:
        """The addresses of every link that has some, by its index, in the kernel's order, IPv4 first.

        Without IPv6 link-local addresses: every pod's link has one.
        """
        found: dict[int, list[IPInterface]] = {}
        for row in self._connection.dump(m.dump_addresses()):
            if is_link_local6(row):
                continue
            if (read := read_address(row)) is not None:
                found.setdefault(read[0], []).append(read[1])
        return found

    async def routes(self, ifindex: int) -> list[RouteInfo]:
        """The unicast routes over a link, in the main table; off the loop, as a node may have very many."""
        return await anyio.to_thread.run_sync(routes_over, ifindex)

    def programs(self, ifindex: int) -> LinkPrograms:
        """The programs attached where :meth:`attach_clsact` attaches; none for a missing link."""
        return read_programs(self._connection, ifindex)

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """Make a link a node device: MTU, queue length 1000, no ARP, up. Repeating it changes nothing."""
        self._connection.run(m.set_device(ifindex, name, mtu))

    def set_mtu(self, ifindex: int, mtu: int) -> None:
        """Give a link another MTU. ENODEV: it does not exist."""
        self._connection.run(m.set_mtu(ifindex, mtu))

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Give a link an address of its own, as a /32 or /128. EEXIST when it has it."""
        self._connection.run(m.add_address(ifindex, name, address))

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Take an address off a link, and the route to it alone; a missing one is fine."""
        self._connection.run(
            m.delete_address(ifindex, name, address), m.delete_route(ifindex, m.network_of(address.ip))
        )

    def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """A route of the main table, through ``gateway`` or on the link; in place of another one to there.

        Packets of the node's own on it are from ``source``.
        """
        self._connection.run(m.add_route(ifindex, destination, via=gateway, source=source, replace=True))

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """A route to this address alone on a link that is up, which is at this MAC address for good.

        Without the second a pod's first packets would be lost: a new link has no IPv6 address of its own to
        ask from for a second or two. Both go with the link.
        """
        destination = m.network_of(address)
        self._connection.run(
            m.set_neighbour(ifindex, address, mac), m.add_route(ifindex, destination, replace=True)
        )

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        """Remove a route of the main table over a link; a missing one is fine."""
        self._connection.run(m.delete_route(ifindex, network))

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete links off the loop, together with those of other callers; see :class:`Reaper`."""
        await self._reaper.reap(ifindexes)


def _closed() -> NotStartedError:
    return NotStartedError("the netlink socket is not open: its hook has not started, or has stopped")


def read_programs(connection: Connection, ifindex: int) -> LinkPrograms:
    """The programs of one link, over this connection."""
    return LinkPrograms(
        *(
            read_program(connection.dump(m.dump_filters(ifindex, parent)))
            for parent in (m.TC_H_INGRESS, m.TC_H_EGRESS)
        )
    )


def is_present(ifindex: int, name: str) -> bool:
    """Whether the link with that index is there, and has that name: an index may be another link's by now."""
    try:
        return socket.if_indextoname(ifindex) == name
    except OSError:
        return False


def routes_over(ifindex: int) -> list[RouteInfo]:
    """The unicast routes over a link, in the main table, over a socket of its own: for a worker thread."""
    return [row for row in all_routes(ifindex) if row.ifindex == ifindex]


def all_routes(ifindex: int = 0) -> list[RouteInfo]:
    """The same over all links, or at least over this one."""
    with connected(strict=True) as connection:
        rows = map(read_route, connection.dump(m.dump_routes(socket.AF_UNSPEC, ifindex)))
        return [row for row in rows if row is not None]


def programs_of(ifindexes: Iterable[int]) -> dict[int, LinkPrograms]:
    """The programs of many links, over a socket of its own: 0.1 ms a link, for a worker thread.

    Raises NetlinkError, and OSError when no socket can be opened.
    """
    with connected() as connection:
        return {ifindex: read_programs(connection, ifindex) for ifindex in ifindexes}


def xdp_of(ifindex: int) -> XdpPrograms:
    """The XDP programs of a link, over a socket of its own. Raises NetlinkError."""
    with connected() as connection:
        return read_xdp(connection.run(m.get_link_at(ifindex))[-1])


def take_off_xdp(ifindex: int, program_fd: int, *, generic: bool) -> None:
    """Take this XDP program off a link, over a socket of its own. Raises NetlinkError."""
    with connected() as connection:
        connection.run(m.set_xdp(ifindex, -1, generic=generic, instead_of=program_fd))
