"""The network namespaces of this machine, acting in each, and the links of the pod in one."""

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


NAMED: Final = (Path("/var/run/cilium/netns"), Path("/var/run/netns"))
"""Where container runtimes pin namespaces; an agent in a container sees the host's in the first."""
_CLONE_NEWNET: Final = 0x4000_0000
_SO_NETNS_COOKIE: Final = 71  # asm-generic/socket.h, Linux 5.14


def own_netns_cookie() -> int:
    """The kernel's number of the calling thread's network namespace. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as any_socket:
        cookie = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int.from_bytes(cookie, "little")


def namespaces(named: Sequence[Path] = NAMED, processes: Path = Path("/proc")) -> Iterator[int]:
    """A descriptor of every network namespace but our own, once; each is closed when the next is asked for.

    By the runtimes' pins, and by processes as far as they are seen.
    """
    known = {Path("/proc/self/ns/net").stat().st_ino}
    for path in _paths(named, processes):
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
    """Call ``work`` in our network namespace and, with ``others``, in all the others, until it returns False.

    In a thread of its own, which ends: no other code ever runs in a wrong namespace. Raises what it raises.
    """

    def run() -> None:
        if not work() or not others:
            return
        for descriptor in namespaces():
            if _enter(descriptor) and not work():
                return

    _in_thread(run, "in each network namespace")


def run_in_new(work: Callable[[], T]) -> T:
    """What ``work`` returns, called in a new network namespace; it lasts while something of it is open.

    In a thread of its own, which ends. Raises what ``work`` raises, and OSError where none can be made.
    """

    def run() -> T:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(ctypes.c_int(_CLONE_NEWNET)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"no network namespace can be made: {os.strerror(number)}")
        return work()

    return _in_thread(run, "in a new network namespace")


def _in_thread(run: Callable[[], T], name: str) -> T:
    """What ``run`` returns or raises, in a thread that ends: a thread that changed its namespace is spent."""
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


def _paths(named: Sequence[Path], processes: Path) -> Iterator[Path]:
    for directory in named:
        with suppress(OSError):
            yield from sorted(directory.iterdir())
    for process in processes.iterdir():
        if process.name.isdigit():
            yield process / "ns" / "net"


def _enter(descriptor: int) -> bool:
    """Whether it is a network namespace, which the thread is in now."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.setns(ctypes.c_int(descriptor), ctypes.c_int(_CLONE_NEWNET)) == 0)


_EVERYWHERE: dict[int, IPv4Network | IPv6Network] = {4: IPv4Network("0.0.0.0/0"), 6: IPv6Network("::/0")}


@lru_cache(maxsize=64)
def _routes(ifindex: int, gateway: IPv4Address | IPv6Address, mtu: int) -> tuple[Request, Request]:
    """The gateway on the link, then everything through it: alike in most pods."""
    itself = IPv4Network(gateway) if isinstance(gateway, IPv4Address) else IPv6Network(gateway)
    everywhere = _EVERYWHERE[gateway.version]
    return m.add_route(ifindex, itself), m.add_route(ifindex, everywhere, via=gateway, mtu=mtu)


class PodLink:
    """The links of one pod, over a netlink socket that was opened inside its namespace.

    Methods raise NetlinkError when the kernel refuses.
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
        """Up, the addresses, each gateway on the link, default routes through them with ``mtu``: one batch.

        ``gateways`` has one per address, in the same order; ValueError otherwise. An IPv6 address needs IPv6
        on in the pod's namespace, else the kernel answers EACCES: no netlink message can switch it on. Routes
        that exist are fine (another plugin may have made them); an address that exists is EEXIST.
        """
        batch = [m.link_up(ifindex, name)]
        for address, gateway in zip(addresses, gateways, strict=True):
            batch += (m.add_address(ifindex, name, address), *_routes(ifindex, gateway, mtu))
        self._connection.run(*batch)

    def addresses(self, name: str) -> frozenset[IPv4Address | IPv6Address] | None:
        """The addresses of the link of that name; None when there is no such link."""
        try:
            ifindex, _ = read_indexes(self._connection.run(m.get_link(name))[-1])
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        rows = map(read_address, self._connection.dump(m.dump_addresses()))
        return frozenset(row[1].ip for row in rows if row is not None and row[0] == ifindex)

    def links(self) -> list[LinkInfo]:
        """Every link of the pod, in the kernel's order; a peer's index is of the namespace it is in."""
        return list(map(read_link, self._connection.dump(m.dump_links())))

    def addresses_of(self, ifindex: int) -> list[IPv4Address | IPv6Address]:
        """The addresses of the link, in the kernel's order: the wider scope first, the older first."""
        rows = map(read_address, self._connection.dump(m.dump_addresses()))
        return [row[1].ip for row in rows if row is not None and row[0] == ifindex]

    def set_mac(self, ifindex: int, name: str, mac: bytes) -> None:
        """Give a link another MAC address."""
        self._connection.run(m.set_mac(ifindex, name, mac))

    def set_route_mtu(self, mtu: int) -> None:
        """Give every unicast route of the main table this MTU; what else they say stays."""
        for family in (m.AF_INET, m.AF_INET6):
            for row in self._connection.dump(m.dump_routes(family)):
                if row.body[0] != family or (route := read_route(row)) is None:
                    continue
                if (body := with_mtu(row, mtu)) is not None:
                    self._connection.run(m.replace_route(str(route[1]), body))

    def resize(self, ifindex: int, mtu: int, route_mtu: int) -> None:
        """Give the link another MTU, and ``route_mtu`` to those of its routes that have one of their own."""
        for family in (m.AF_INET, m.AF_INET6):
            for row in self._connection.dump(m.dump_routes(family)):
                route = read_route(row) if row.body[0] == family else None
                if route is None or route.ifindex != ifindex or not mtu_of(row):
                    continue
                if (body := with_mtu(row, route_mtu)) is not None:
                    self._connection.run(m.replace_route(str(route[1]), body))
        self._connection.run(m.set_mtu(ifindex, mtu))

    def delete(self, name: str) -> bool:
        """Delete the link of that name, blocking 14 to 20 ms for RCU; False, at once, when there is none."""
        try:
            self._connection.run(m.delete_link_named(name))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return False
            raise
        return True
