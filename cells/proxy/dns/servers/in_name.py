"""Asking servers by UDP in the name of pods: by a socket with the address and port of who asks.

For:    DNSProxy. Needs: the running event loop. Gives: PodSockets.
Why:    so the server sees the pod, as do the policies of other nodes. The datapath brings what answers such a
        socket to it, and to the pod once there is none.
Source: ip(7) IP_TRANSPARENT; Cilium 1.17, dnsproxy-enable-transparent-mode.

A resolver asks for both families by one socket: a socket is open as long as an answer to it is awaited.
"""

from __future__ import annotations

import asyncio
import select
import socket
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from cells.ipam import text_of
from cells.proxy.dns.exchange import Asking
from cells.proxy.dns.servers.upstream import LARGEST, Told
from cells.proxy.dns.sockets import Address, upstream

AT_ONCE: Final = 64
"""Sockets that are read before others get their turn."""

Query = tuple[str, int, bytes]
"""The server's address and port as recvfrom(2) tells them, and the query's first two bytes: its id."""


class PodSocket:
    """A socket in the name of a pod."""

    def __init__(self, of: PodSockets, key: Address, identity: int) -> None:
        self._of = of
        self.key = key
        self._waiting: dict[Query, list[Told]] = {}
        self.made = upstream(key[0].version, identity, socket.SOCK_DGRAM, key)

    @property
    def waits(self) -> bool:
        """Whether answers are awaited."""
        return bool(self._waiting)

    def ask(self, asking: Asking, told: Told) -> Waiting:
        """Send a query. Raises OSError."""
        server = text_of(asking.server[0]), asking.server[1]
        self.made.sendto(asking.data, server)
        query = (*server, asking.data[:2])
        self._waiting.setdefault(query, []).append(told)
        return Waiting(self, query, told)

    def received(self) -> None:
        """Something has come, or an error."""
        try:
            data, sender = self.made.recvfrom(LARGEST)
        except OSError:  # of an earlier one; errors of the network are told to the pod itself
            return
        query = _canonical(sender[0]), sender[1], data[:2]
        for told in list(self._waiting.get(query, ())):
            if told(data):
                self.forget(query, told)
                return

    def forget(self, query: Query, told: Told) -> None:
        """Nobody waits for this any more."""
        waiting = self._waiting.get(query, [])
        if told in waiting:
            waiting.remove(told)
        if not waiting:
            self._waiting.pop(query, None)
        if not self._waiting:
            self._of.close_one(self)


class Waiting:
    """A query that waits for its answer."""

    __slots__ = ("_made", "_query", "_told")

    def __init__(self, made: PodSocket, query: Query, told: Told) -> None:
        self._made = made
        self._query = query
        self._told = told

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self._made.forget(self._query, self._told)


class PodSockets:
    """The sockets of one proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._all: dict[Address, PodSocket] = {}
        self._by_descriptor: dict[int, PodSocket] = {}
        # One of our own, which the loop watches: to have it watch each socket takes longer than the rest.
        self._ready = select.epoll()
        loop.add_reader(self._ready, self._received)

    def ask(self, asking: Asking, identity: int, told: Told) -> Waiting:
        """Send a query; ``told`` gets what comes back, until it says that this was it.

        Raises OSError: EADDRINUSE where somebody on the node holds the port for every address.
        """
        key = asking.client
        made = self._all.get(key)
        if made is None:
            made = self._all[key] = PodSocket(self, key, identity)
            self._by_descriptor[made.made.fileno()] = made
            self._ready.register(made.made, select.EPOLLIN)
        try:
            return made.ask(asking, told)
        except OSError:
            if not made.waits:
                self.close_one(made)
            raise

    def close_one(self, one: PodSocket) -> None:
        """Let go of it."""
        if self._all.get(one.key) is one:
            del self._all[one.key], self._by_descriptor[one.made.fileno()]
            one.made.close()  # and is watched no more

    def _received(self) -> None:
        for descriptor, _ in self._ready.poll(0, AT_ONCE):
            one = self._by_descriptor.get(descriptor)
            if one is not None:
                one.received()

    def close(self) -> None:
        """Let go of all."""
        for one in list(self._all.values()):
            self.close_one(one)
        self._loop.remove_reader(self._ready)
        self._ready.close()


@lru_cache(maxsize=1024)
def _canonical(text: str) -> str:
    """An address as this cell writes it."""
    return text_of(ip_address(text))
