"""Network namespaces: run code in other namespaces, and configure a pod's links inside its namespace.

The CNI server uses PodLink over a socket that was opened in the pod's namespace. Code that changes its
namespace runs in a thread that ends afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Final, TypeVar

from cells.netlink import messages as m
from cells.netlink.connection import Connection, NetlinkError
from cells.netlink.rows import LinkInfo, mtu_of, read_address, read_indexes, read_link, read_route, with_mtu
from cells.netlink.wire import Request

__all__ = ["PodLink", "own_netns_cookie", "run_in_each", "run_in_new"]

T = TypeVar("T")


_PINNED: Final = (Path("/var/run/cilium/netns"), Path("/var/run/netns"))
"""Where container runtimes pin namespaces; an agent in a container sees the host's in the first."""
_CLONE_NEWNET: Final = 0x4000_0000
_SO_NETNS_COOKIE: Final = 71  # asm-generic/socket.h, Linux 5.14


def own_netns_cookie() -> int:
    """Return the netns cookie of the calling thread's network namespace. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as any_socket:
        cookie = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int.from_bytes(cookie, "little")


def other_namespaces() -> Iterator[int]:
    """Yield a descriptor of each other network namespace once; it is closed at the next step.

    Namespaces are found by the runtimes' pins and by the visible processes.
    """
    known = {Path("/proc/self/ns/net").stat().st_ino}
    for path in _paths():
        with suppress(OSError):  # closed meanwhile
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                inode = os.fstat(descriptor).st_ino
                if inode not in known:
                    known.add(inode)
                    yield descriptor
            finally:
                os.close(descriptor)


def run_in_each(work: Callable[[], bool], *, others: bool) -> None:
    """Call ``work`` in our network namespace and, with ``others``, in all others, until it returns False.

    Runs in a thread that ends afterwards, so that no other code runs in a wrong namespace. Raises what
    ``work`` raises.
    """

    def run() -> None:
        if not work() or not others:
            return
        for descriptor in other_namespaces():
            if _enter(descriptor) and not work():
                return

    _in_thread(run, "in each network namespace")


def run_in_new(work: Callable[[], T]) -> T:
    """Call ``work`` in a new network namespace and return its result.

    The namespace lasts while a descriptor or socket of it is open. Runs in a thread that ends afterwards.
    Raises what ``work`` raises, and OSError if no namespace can be created.
    """

    def run() -> T:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(ctypes.c_int(_CLONE_NEWNET)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot create a network namespace: {os.strerror(number)}")
        return work()

    return _in_thread(run, "in a new network namespace")


def _in_thread(run: Callable[[], T], name: str) -> T:
    """Run in a new thread and return its result or raise its error.

    The thread ends afterwards because it may be in another namespace.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def attempt() -> None:
        try:
            results.append(run())
        except BaseException as error:  # noqa: BLE001  # raised in the caller
            failures.append(error)

    thread = threading.Thread(target=attempt, name=name)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _paths() -> Iterator[Path]:
    for directory in _PINNED:
        with suppress(OSError):
            yield from sorted(directory.iterdir())
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            yield process / "ns" / "net"


def _enter(descriptor: int) -> bool:
    """Move the thread into this network namespace; return False if the descriptor is not one."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.setns(ctypes.c_int(descriptor), ctypes.c_int(_CLONE_NEWNET)) == 0)


_EVERYWHERE: dict[int, IPv4Network | IPv6Network] = {4: IPv4Network("0.0.0.0/0"), 6: IPv6Network("::/0")}


@lru_cache(maxsize=64)
def _routes(ifindex: int, gateway: IPv4Address | IPv6Address, mtu: int) -> tuple[Request, Request]:
    """Return the on-link route to the gateway and the default route through it; the same for most pods."""
    itself = IPv4Network(gateway) if isinstance(gateway, IPv4Address) else IPv6Network(gateway)
    default_network = _EVERYWHERE[gateway.version]
    return m.add_route(ifindex, itself), m.add_route(ifindex, default_network, via=gateway, mtu=mtu)


class PodLink:
    """The links of one pod, over a netlink socket that was opened in the pod's namespace.

    Methods raise NetlinkError when the kernel refuses a request.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._connection = Connection(fd)

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPv4Address | IPv6Address],
        gateways: Sequence[IPv4Address | IPv6Address],
        mtu: int,
    ) -> None:
        """Bring the link up, add its addresses and add default routes with ``mtu``, in one batch.

        ``gateways`` has one gateway per address, in the same order (ValueError otherwise); each also gets an
        on-link route. An IPv6 address needs IPv6 enabled in the pod's namespace, else the kernel answers
        EACCES: no netlink message can enable it. Existing routes are accepted (another plugin may have added
        them); an existing address raises EEXIST.
        """
        batch = [m.link_up(ifindex, name)]
        for address, gateway in zip(addresses, gateways, strict=True):
            batch += (m.add_address(ifindex, name, address), *_routes(ifindex, gateway, mtu))
        self._connection.run(*batch)

    def addresses(self, name: str) -> frozenset[m.IPInterface] | None:
        """Return the addresses of the link of this name; None if there is no such link."""
        try:
            ifindex, _ = read_indexes(self._connection.run(m.get_link(name))[-1])
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        rows = map(read_address, self._connection.dump(m.dump_addresses()))
        return frozenset(row[1] for row in rows if row is not None and row[0] == ifindex)

    def links(self) -> list[LinkInfo]:
        """Return all links of the pod in the kernel's order; a peer's index is of the peer's namespace."""
        return list(map(read_link, self._connection.dump(m.dump_links())))

    def addresses_of(self, ifindex: int) -> list[IPv4Address | IPv6Address]:
        """Return the addresses of a link in the kernel's order: wider scope first, then older first."""
        rows = map(read_address, self._connection.dump(m.dump_addresses()))
        return [row[1].ip for row in rows if row is not None and row[0] == ifindex]

    def set_mac(self, ifindex: int, name: str, mac: bytes) -> None:
        """Set the MAC address of a link."""
        self._connection.run(m.set_mac(ifindex, name, mac))

    def set_route_mtu(self, mtu: int) -> None:
        """Set the MTU of all unicast routes of the main table, and keep their other attributes."""
        for family in (m.AF_INET, m.AF_INET6):
            for row in self._connection.dump(m.dump_routes(family)):
                if row.body[0] != family or (route := read_route(row)) is None:
                    continue
                if (body := with_mtu(row, mtu)) is not None:
                    self._connection.run(m.replace_route(str(route[1]), body))

    def resize(self, ifindex: int, mtu: int, route_mtu: int) -> None:
        """Set the link's MTU, and set ``route_mtu`` on those of its routes that have an MTU metric."""
        for family in (m.AF_INET, m.AF_INET6):
            for row in self._connection.dump(m.dump_routes(family)):
                route = read_route(row) if row.body[0] == family else None
                if route is None or route.ifindex != ifindex or not mtu_of(row):
                    continue
                if (body := with_mtu(row, route_mtu)) is not None:
                    self._connection.run(m.replace_route(str(route[1]), body))
        self._connection.run(m.set_mtu(ifindex, mtu))

    def delete(self, name: str) -> bool:
        """Delete the link of this name, blocking 14 to 20 ms for RCU; return False if there is none."""
        try:
            self._connection.run(m.delete_link_named(name))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return False
            raise
        return True
