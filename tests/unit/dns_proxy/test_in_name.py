"""Sockets bound to pods' addresses: one per pod port, while a response is pending."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address

import pytest

from cells.proxy.dns.servers import OnReply, PodSockets
from tests.support.dns import query
from tests.support.namespaces import need_root

pytestmark = pytest.mark.anyio
HERE, POD = ip_address("127.0.0.1"), ip_address("127.0.0.77")


@contextmanager
def server() -> Iterator[socket.socket]:
    need_root()  # IP_TRANSPARENT
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        yield made


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((str(POD), 0))
        return int(probe.getsockname()[1])


def ask(sockets: PodSockets, to: socket.socket, port: int, number: int, on_reply: OnReply) -> None:
    sockets.send((POD, port), (HERE, to.getsockname()[1]), 0, query("x", number=number), on_reply)


async def test_queries_of_one_port_share_a_socket_and_get_their_own_answers() -> None:
    with server() as there:
        sockets, spoken, both = PodSockets(asyncio.get_running_loop()), dict[int, bytes](), asyncio.Event()

        def answered(number: int, data: bytes | OSError) -> bool:
            if isinstance(data, OSError) or data.endswith(b"a guess"):
                return False
            spoken[number] = data
            if len(spoken) == 2:
                both.set()
            return True

        port = free_port()
        try:
            for number in (1, 2):
                ask(sockets, there, port, number, partial(answered, number))
            clients = [there.recvfrom(512) for _ in range(2)]
            assert {client for _, client in clients} == {(str(POD), port)}, "from the pod's address and port"
            for data, client in reversed(clients):
                there.sendto(data + b"a guess", client)
                there.sendto(data, client)
            async with asyncio.timeout(30):
                await both.wait()
            assert {number: data[:2] for number, data in spoken.items()} == {1: b"\0\1", 2: b"\0\2"}
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as another:
                another.bind(("0.0.0.0", port))  # nothing is left of it
        finally:
            sockets.close()


async def test_a_port_bound_by_another_process_raises_address_in_use() -> None:
    with server() as there, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind(("0.0.0.0", 0))
        sockets = PodSockets(asyncio.get_running_loop())
        try:
            with pytest.raises(OSError, match="in use") as refused:
                ask(sockets, there, held.getsockname()[1], 1, lambda _: True)
            assert refused.value.errno == errno.EADDRINUSE
        finally:
            sockets.close()
