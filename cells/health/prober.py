"""Probes every node and its health endpoint, with ICMP echo and HTTP, in rounds.

Source: Cilium 1.17, pkg/health/server/prober.go.
Why:    one raw socket of each family sends all echo requests; a socket for each request would use up the
        agent's descriptors with thousands of nodes. The probes of a round are spread over its interval.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Annotated, Final, Protocol

import anyio
from msgspec import Meta

from cells.health.paths import ClusterReport, Outcome, ProbeResults
from lifecycle import Settings

# Settings, under Cilium's names.
#
# Source: Cilium 1.17; connectivity-probe-frequency-ratio is of 1.18.

FASTEST: Final = 10.0
SLOWER_BY: Final = 100.0
"""Seconds between two probes of an address at ratio 0, and how many more at ratio 1."""


class NodeHealthSettings(Settings, frozen=True):
    """Probes between the nodes of the cluster."""

    enable_health_checking: bool = False
    """Probe all nodes by ICMP and HTTP, answer probes of others, and serve health.sock."""

    enable_endpoint_health_checking: bool = True
    """With enable-health-checking, give this node an endpoint of identity health that answers probes as a pod
    would, and probe those of all nodes."""

    cluster_health_port: Annotated[int, Meta(ge=1, le=65535)] = 4240
    """TCP port that probes go to, and that answers them."""

    health_check_icmp_failure_threshold: Annotated[int, Meta(ge=1, le=100)] = 3
    """Echo requests of one probe; one answer is enough."""

    connectivity_probe_frequency_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """How rarely to probe: each address every 10 seconds at 0, every 110 seconds at 1."""

    @property
    def endpoints(self) -> bool:
        """Whether nodes have health endpoints."""
        return self.enable_health_checking and self.enable_endpoint_health_checking

    @property
    def interval(self) -> float:
        """Seconds from one probe of an address to the next."""
        return FASTEST + SLOWER_BY * self.connectivity_probe_frequency_ratio


DEADLINE: Final = 10.0
"""Timeout of a probe, in seconds."""
ECHO_PAUSE: Final = 0.1
"""Seconds between two echo requests of a probe."""
AT_ONCE: Final = 512
"""Maximum number of parallel probes; a round that needs more takes longer than its interval."""
TIMED_OUT: Final = "Connection timed out"
_STATUS_LINE: Final = re.compile(r"HTTP/\d\.\d (\d{3}(?: .*)?)", re.ASCII)
_SHOWN: Final = 80
"""Number of characters of an answer that is not HTTP, in the error."""

_ECHO = struct.Struct("!BBHHH")
_ICMP_FILTER: Final = 1  # linux/icmp.h
_ICMPV6_FILTER: Final = 1  # linux/icmpv6.h
_SOL_RAW: Final = 255  # linux/socket.h
_REQUEST: Final = {socket.AF_INET: 8, socket.AF_INET6: 128}
_REPLY: Final = {socket.AF_INET: 0, socket.AF_INET6: 129}


class ProbeTransport(Protocol):
    """Sends probes to other nodes."""

    def open(self) -> None:
        """Prepare for probes."""
        ...

    def close(self) -> None:
        """Release what open() acquired."""
        ...

    async def icmp(self, ip: str, requests: int) -> Outcome:
        """Send echo requests until one is answered."""
        ...

    async def http(self, ip: str, port: int) -> Outcome:
        """GET /hello."""
        ...


class NodeProber:
    """Probes the addresses of `results` in rounds, and publishes a report after each."""

    def __init__(
        self,
        results: ProbeResults,
        transport: ProbeTransport,
        publish: Callable[[ClusterReport], None],
        *,
        port: int,
        requests: int,
        interval: float,
    ) -> None:
        self._results = results
        self._transport = transport
        self._publish = publish
        self._port = port
        self._requests = requests
        self._interval = interval
        self._known = anyio.Event()
        self._limit = anyio.Semaphore(AT_ONCE)

    def wake(self) -> None:
        """Begin the first round, as nodes are known."""
        self._known.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        self._transport.open()
        try:
            await self._known.wait()
            async with anyio.create_task_group() as probes:
                while True:
                    await self._round(probes)
        finally:
            self._transport.close()

    async def _round(self, probes: anyio.abc.TaskGroup) -> None:
        started, begin = time.time(), anyio.current_time()
        addresses = self._results.addresses()
        for number, ip in enumerate(addresses):
            await anyio.sleep_until(begin + number * self._interval / len(addresses))
            await self._limit.acquire()
            probes.start_soon(self._probe, ip)
        await anyio.sleep_until(begin + self._interval)
        self._publish(self._results.report(started))

    async def _probe(self, ip: str) -> None:
        try:
            async with anyio.create_task_group() as both:
                both.start_soon(self._echo, ip)
                self._results.record(ip, http=await self._transport.http(ip, self._port))
        finally:
            self._limit.release()

    async def _echo(self, ip: str) -> None:
        self._results.record(ip, icmp=await self._transport.icmp(ip, self._requests))


class SocketTransport:
    """Probes over TCP connections, and over a raw ICMP socket of each family."""

    def __init__(self) -> None:
        self._identifier = secrets.randbelow(1 << 16)
        self._sequence = 0
        self._sockets: dict[int, socket.socket] = {}
        self._errors: dict[int, str] = {}
        self._waiting: dict[int, tuple[str, int, asyncio.Future[int]]] = {}
        """By sequence number: address, time of the request, and the future latency; both in nanoseconds."""

    def open(self) -> None:
        """Open the raw sockets; without one, each probe of its family fails with the reason."""
        loop = asyncio.get_running_loop()
        for family, protocol in (
            (socket.AF_INET, socket.IPPROTO_ICMP),
            (socket.AF_INET6, socket.IPPROTO_ICMPV6),
        ):
            try:
                made = socket.socket(family, socket.SOCK_RAW | socket.SOCK_NONBLOCK, protocol)
            except OSError as error:
                self._errors[family] = f"socket: {_reason(error)}"
                continue
            _only_replies(made)
            self._sockets[family] = made
            loop.add_reader(made, self._received, made)

    def close(self) -> None:
        """Close the raw sockets."""
        loop = asyncio.get_running_loop()
        for made in self._sockets.values():
            loop.remove_reader(made)
            made.close()
        self._sockets.clear()
        self._errors.clear()

    async def icmp(self, ip: str, requests: int) -> Outcome:
        """The latency of the first reply to up to this number of requests, 100 ms apart."""
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        if (unavailable := self._errors.get(family)) is not None:
            return Outcome(failure=unavailable)
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        sent: list[int] = []
        try:
            with anyio.move_on_after(DEADLINE):
                for _ in range(requests):
                    sent.append(self._send(self._sockets[family], ip, reply))
                    await asyncio.wait((reply,), timeout=ECHO_PAUSE)
                    if reply.done():
                        return Outcome(reply.result())
                return Outcome(await reply)
        except OSError as error:
            return Outcome(failure=f"write {ip}: {_reason(error)}")
        finally:
            for sequence in sent:
                self._waiting.pop(sequence, None)
        return Outcome(failure=TIMED_OUT)

    def _send(self, made: socket.socket, ip: str, reply: asyncio.Future[int]) -> int:
        """Send a request. Returns its sequence number; raises OSError."""
        while self._sequence in self._waiting:
            self._sequence = (self._sequence + 1) & 0xFFFF
        sequence = self._sequence
        self._sequence = (sequence + 1) & 0xFFFF
        kind = _REQUEST[made.family]
        packet = _ECHO.pack(kind, 0, 0, self._identifier, sequence)
        if made.family == socket.AF_INET:  # of ICMPv6 the kernel computes it
            packet = _ECHO.pack(kind, 0, _checksum(packet), self._identifier, sequence)
        made.sendto(packet, (ip, 0))
        self._waiting[sequence] = ip, time.perf_counter_ns(), reply
        return sequence

    def _received(self, made: socket.socket) -> None:
        try:
            data, (sender, *_) = made.recvfrom(2048)
        except OSError:  # an ICMP error of an earlier request; its probe times out
            return
        now = time.perf_counter_ns()
        message = data[(data[0] & 0xF) * 4 :] if made.family == socket.AF_INET else data
        if len(message) < _ECHO.size:
            return
        kind, _, _, identifier, sequence = _ECHO.unpack_from(message)
        waiting = self._waiting.get(sequence)
        if kind != _REPLY[made.family] or identifier != self._identifier or waiting is None:
            return
        ip, sent, reply = waiting
        if sender == ip and not reply.done():
            reply.set_result(now - sent)

    async def http(self, ip: str, port: int) -> Outcome:
        """The time until an answer 200; errors in the words of Go's client."""
        host = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        started_at = time.perf_counter_ns()
        where = f'Get "http://{host}/hello": '
        try:
            with anyio.fail_after(DEADLINE):
                status = await _get(ip, port, host)
        except _GetError as error:
            return Outcome(failure=where + str(error))
        except TimeoutError:
            late = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
            return Outcome(failure=where + late)
        if status[:3] != "200":
            return Outcome(failure=f"unexpected status code: {status[:3]} {status}")
        return Outcome(time.perf_counter_ns() - started_at)


class _GetError(Exception):
    """Why there is no answer, in the words of Go's HTTP client."""


async def _get(ip: str, port: int, host: str) -> str:
    """GET /hello: the status of the answer, such as ``200 OK``. Raises _GetError."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        answer, doing = b"", f"dial tcp {host}: connect"
        try:
            await loop.sock_connect(connection, (ip, port))
            doing = f"write tcp {_ends(connection)}: write"
            request = f"GET /hello HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            await loop.sock_sendall(connection, request.encode())
            doing = f"read tcp {_ends(connection)}: read"
            while b"\n" not in answer and len(answer) < 4096:
                if not (piece := await loop.sock_recv(connection, 4096)):
                    raise _GetError("EOF" if not answer else "unexpected EOF")
                answer += piece
        except OSError as error:
            raise _GetError(f"{doing}: {_reason(error)}") from error
    line = answer.partition(b"\n")[0].removesuffix(b"\r").decode("latin-1")
    if (match := _STATUS_LINE.fullmatch(line)) is None:
        found = line[:_SHOWN].replace("\\", r"\\").replace('"', r"\"")
        broken = "net/http: HTTP/1.x transport connection broken: malformed HTTP response"
        raise _GetError(f'{broken} "{found}"')
    return match[1]


def _ends(connection: socket.socket) -> str:
    """Both ends of a connection: ``10.1.0.1:40000->10.1.0.2:4240``."""
    ends = (connection.getsockname(), connection.getpeername())
    return "->".join(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip, port, *_ in ends)


def _only_replies(made: socket.socket) -> None:
    """A filter that lets only echo replies pass."""
    if made.family == socket.AF_INET:
        blocked = 0xFFFFFFFF & ~(1 << _REPLY[socket.AF_INET])
        made.setsockopt(_SOL_RAW, _ICMP_FILTER, struct.pack("=I", blocked))
    else:
        blocked_types = [0xFFFFFFFF] * 8
        word, bit = divmod(_REPLY[socket.AF_INET6], 32)
        blocked_types[word] &= ~(1 << bit)
        made.setsockopt(socket.IPPROTO_ICMPV6, _ICMPV6_FILTER, struct.pack("=8I", *blocked_types))


def _checksum(packet: bytes) -> int:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(word for (word,) in struct.iter_unpack("!H", packet))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def _reason(error: OSError) -> str:
    """The error in Go's words: ``connection refused``."""
    return os.strerror(error.errno or errno.EIO).lower()
