"""The network namespaces of this machine, and acting in each."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["own_netns_cookie", "run_in_each", "run_in_new"]

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
