"""Sockets to DNS servers: reused for a limited time, never for two queries at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest

from cells.proxy.dns.servers import MAX_QUERIES, NodeSockets
from cells.proxy.dns.sockets import Address
from tests.support.namespaces import need_root

pytestmark = pytest.mark.anyio
HERE = ip_address("127.0.0.1")


class Asked:
    """What came back for one query."""

    def __init__(self) -> None:
        self.spoken: list[bytes | OSError] = []
        self.came = asyncio.Event()

    def __call__(self, spoken: bytes | OSError) -> bool:
        if spoken == b"a guess":
            return False
        self.spoken.append(spoken)
        self.came.set()
        return True


@contextmanager
def opened() -> Iterator[tuple[NodeSockets, socket.socket, Address]]:
    need_root()  # the mark
    upstream = NodeSockets(asyncio.get_running_loop())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        try:
            yield upstream, server, (HERE, server.getsockname()[1])
        finally:
            upstream.close()


async def test_a_socket_serves_one_query_after_another_but_not_for_ever() -> None:
    ports = []
    with opened() as (upstream, server, address):
        for _ in range(MAX_QUERIES + 1):
            asked = Asked()
            upstream.send(address, 0, b"question", asked)
            _, client = server.recvfrom(512)
            ports.append(client[1])
            server.sendto(b"a guess", client)
            server.sendto(b"answer", client)
            async with asyncio.timeout(30):
                await asked.came.wait()
            assert asked.spoken == [b"answer"]
        assert len(set(ports[:MAX_QUERIES])) == 1
        assert ports[MAX_QUERIES] != ports[0]
        first, second = Asked(), Asked()
        upstream.send(address, 0, b"1", first)
        upstream.send(address, 0, b"2", second)
        assert server.recvfrom(512)[1] != server.recvfrom(512)[1], "each has its own while it waits"


async def test_a_refused_dns_query_is_reported_and_repeated_from_another_socket() -> None:
    with opened() as (upstream, server, address):
        server.close()
        for _ in range(2):
            asked = Asked()
            upstream.send(address, 0, b"question", asked)
            async with asyncio.timeout(30):
                await asked.came.wait()
            (error,) = asked.spoken
            assert isinstance(error, ConnectionRefusedError)
