"""Deletes links, many at once.

Deleting one link waits 14 to 20 ms for RCU; deleting a group of fifty waits hardly longer. So links to go are
collected while an earlier deletion runs, put into a link group nobody else uses, and deleted as a group, in a
worker thread on a socket of its own.   Needs: nothing.   Gives: Reaper, delete_links().
"""

import errno
import os
import secrets
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from math import inf

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from cells.node.netlink import messages as m
from cells.node.netlink.connection import Connection, NetlinkError, open_socket
from lifecycle import NotStartedError

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
        """Delete these links and return once they are gone; one that is gone already is fine.

        A cancelled caller stops waiting, its links go all the same.
        Raises NetlinkError for the first that the kernel would not delete.
        """
        if self._queue is None:
            raise NotStartedError("links cannot be reaped: the netlink hook has not started, or has stopped")
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
        finally:  # cancelled: nobody may wait for ever
            while receive.statistics().current_buffer_used:
                tickets.append(receive.receive_nowait())
            for ticket in tickets:
                if not ticket.done.is_set():
                    ticket.failures = [NetlinkError(errno.ECANCELED, "delete links")]
                    ticket.done.set()


def delete_links(ifindexes: Collection[int]) -> dict[int, NetlinkError]:
    """Delete links of this namespace on a socket of its own, blocking; returns what failed, by index."""
    try:
        fd = open_socket()
    except OSError as error:
        failure = NetlinkError(error.errno or errno.EIO, "open a netlink socket to delete links")
        return dict.fromkeys(ifindexes, failure)
    try:
        connection = Connection(fd)
        if len(ifindexes) > 1 and _delete_together(connection, list(ifindexes)):
            return {}
        return _delete_each(connection, ifindexes)
    finally:
        os.close(fd)


def _delete_together(connection: Connection, ifindexes: list[int]) -> bool:
    """Delete the links as one group; False when something was in the way, and they go one by one.

    The group's number is random out of 2**30 and lives for this one deletion: nobody else's links, and no
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
