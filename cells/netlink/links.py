"""The node's side of pods: veth pairs, their activation, their programs, their end.

Needs: Lifecycle (its hook opens the socket).   Gives: HostLinks, VethPair, CreatedLink.
Everything but reap() is one synchronous exchange with the kernel of 0.02 to 0.3 ms.
"""

import errno
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface

from cells.netlink import messages as m
from cells.netlink.connection import Connection, NetlinkError, open_socket
from cells.netlink.link_info import LinkInfo, read_indexes, read_link
from cells.netlink.messages import VethPair
from cells.netlink.reaper import Reaper
from cells.netlink.wire import Request, attributes
from lifecycle import Lifecycle


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
            raise RuntimeError("the netlink socket is not open: its hook has not started, or has stopped")
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

    def links(self) -> list[LinkInfo]:
        """Every link of the namespace."""
        return [read_link(row) for row in self._connection.dump(m.dump_links())]

    def addresses(self, ifindex: int) -> list[IPv4Interface]:
        """The IPv4 addresses of a link, in the kernel's order."""
        found = []
        for row in self._connection.dump(m.dump_addresses()):
            _, prefix, _, _, owner = m.ADDRESS.unpack_from(row.body)
            if owner == ifindex:
                values = dict(attributes(row.body, m.ADDRESS.size))
                address = IPv4Address(values.get(m.IFA_LOCAL) or values[m.IFA_ADDRESS])
                found.append(IPv4Interface((address, prefix)))
        return found

    def run(self, *requests: Request) -> None:
        """Send packed requests (of ``messages``) as one batch; raises for the first that failed."""
        self._connection.run(*requests)

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete links off the loop, together with those of other callers; see :class:`Reaper`."""
        await self._reaper.reap(ifindexes)
