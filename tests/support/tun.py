"""A link between L3 devices of two nodes: tun devices, on which packets begin with the network header.

Source: Documentation/networking/tuntap.rst.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from hive.lab.namespaces import Namespaces, inside

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LONGEST = 65536


@contextmanager
def tun_wire(name: str, *ends: tuple[Namespaces, Sequence[str]]) -> Iterator[None]:
    """Create a device of that name in each of two nodes, up and with these addresses; remove both with the
    block.
    """
    with ExitStack() as stack:
        descriptors = [stack.enter_context(_end(name, *end)) for end in ends]
        stop, stopping = os.pipe()
        thread = threading.Thread(target=_carry, args=(*descriptors, stop))
        thread.start()
        try:
            yield
        finally:
            os.close(stopping)
            thread.join()
            os.close(stop)


def open_tun(name: str) -> int:
    """Create a device of that name here, down; it exists until the descriptor is closed, which reads its
    packets.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _end(name: str, where: Namespaces, addresses: Sequence[str]) -> Iterator[int]:
    with inside(where):
        descriptor = open_tun(name)
    try:
        where.run(_bring_up, name, addresses)
        yield descriptor
    finally:
        os.close(descriptor)


def _bring_up(name: str, addresses: Sequence[str]) -> None:
    for address in addresses:
        more = ["nodad"] if ":" in address else []
        subprocess.run(["ip", "address", "add", address, "dev", name, *more], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)


def _carry(one: int, other: int, stop: int) -> None:
    """Forward packets between both ends until ``stop`` ends; a full queue loses one."""
    with selectors.DefaultSelector() as waiting:
        for descriptor, to in ((one, other), (other, one), (stop, -1)):
            waiting.register(descriptor, selectors.EVENT_READ, to)
        while True:
            for key, _ in waiting.select():
                if key.data < 0:
                    return
                try:
                    os.write(key.data, os.read(key.fd, _LONGEST))
                except OSError:
                    continue
