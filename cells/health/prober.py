"""Probes every node and its health endpoint by ICMP echo and HTTP, in rounds.

``NodeProber`` takes addresses from ``ProbeResults``, records outcomes there, and publishes a report after
each round. The probes of a round are spread over its interval.

Why: one raw socket of each family sends all echo requests; a socket per request would exhaust file
descriptors with thousands of nodes.

Source: Cilium 1.17, pkg/health/server/prober.go.
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

# Settings with Cilium's names.
#
# Source: Cilium 1.17; connectivity-probe-frequency-ratio is of 1.18.

MIN_INTERVAL: Final = 10.0
INTERVAL_RANGE: Final = 100.0
"""Seconds between two probes of an address at ratio 0, and the additional seconds at ratio 1."""


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
        """Seconds between two probes of an address."""
        return MIN_INTERVAL + INTERVAL_RANGE * self.connectivity_probe_frequency_ratio


PROBE_TIMEOUT: Final = 10.0
"""Timeout of a probe, in seconds."""
ECHO_INTERVAL: Final = 0.1
"""Seconds between two echo requests of a probe."""
MAX_PARALLEL: Final = 512
"""Maximum number of parallel probes; a round with more probes takes longer than its interval."""
TIMED_OUT: Final = "Connection timed out"
_STATUS_LINE: Final = re.compile(r"HTTP/\d\.\d (\d{3}(?: .*)?)", re.ASCII)
_MAX_SHOWN: Final = 80
"""Number of characters of an invalid HTTP answer in the error."""

_ECHO = struct.Struct("!BBHHH")
_ICMP_FILTER: Final = 1  # linux/icmp.h
_ICMPV6_FILTER: Final = 1  # linux/icmpv6.h
_SOL_RAW: Final = 255  # linux/socket.h
_REQUEST: Final = {socket.AF_INET: 8, socket.AF_INET6: 128}
_REPLY: Final = {socket.AF_INET: 0, socket.AF_INET6: 129}


class ProbeTransport(Protocol):
    """The interface that sends probes to other nodes."""

    def open(self) -> None:
        """Open sockets."""
        ...

    def close(self) -> None:
        """Close the sockets."""
        ...

    async def icmp(self, ip: str, requests: int) -> Outcome:
        """Send echo requests until one is answered."""
        ...

    async def http(self, ip: str, port: int) -> Outcome:
        """Send GET /hello."""
        ...


class NodeProber:
    """Probes the addresses of ``results`` in rounds, and publishes a report after each."""

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
        self._nodes_known = anyio.Event()
        self._limit = anyio.Semaphore(MAX_PARALLEL)

    def wake(self) -> None:
        """Start the first round: nodes are known."""
        self._nodes_known.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        self._transport.open()
        try:
            await self._nodes_known.wait()
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
        """Pending echo requests by sequence number: address, send time and future latency in nanoseconds."""

    def open(self) -> None:
        """Open the raw sockets; if one cannot be opened, the probes of its family fail with the error."""
        loop = asyncio.get_running_loop()
        for family, protocol in (
            (socket.AF_INET, socket.IPPROTO_ICMP),
            (socket.AF_INET6, socket.IPPROTO_ICMPV6),
        ):
            try:
                raw_socket = socket.socket(family, socket.SOCK_RAW | socket.SOCK_NONBLOCK, protocol)
            except OSError as error:
                self._errors[family] = f"socket: {_error_text(error)}"
                continue
            _filter_replies(raw_socket)
            self._sockets[family] = raw_socket
            loop.add_reader(raw_socket, self._receive_reply, raw_socket)

    def close(self) -> None:
        """Close the raw sockets."""
        loop = asyncio.get_running_loop()
        for raw_socket in self._sockets.values():
            loop.remove_reader(raw_socket)
            raw_socket.close()
        self._sockets.clear()
        self._errors.clear()

    async def icmp(self, ip: str, requests: int) -> Outcome:
        """Send up to ``requests`` echo requests, 100 ms apart; return the latency of the first reply."""
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        if (unavailable := self._errors.get(family)) is not None:
            return Outcome(failure=unavailable)
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        sent: list[int] = []
        try:
            with anyio.move_on_after(PROBE_TIMEOUT):
                for _ in range(requests):
                    sent.append(self._send(self._sockets[family], ip, reply))
                    await asyncio.wait((reply,), timeout=ECHO_INTERVAL)
                    if reply.done():
                        return Outcome(reply.result())
                return Outcome(await reply)
        except OSError as error:
            return Outcome(failure=f"write {ip}: {_error_text(error)}")
        finally:
            for sequence in sent:
                self._waiting.pop(sequence, None)
        return Outcome(failure=TIMED_OUT)

    def _send(self, raw_socket: socket.socket, ip: str, reply: asyncio.Future[int]) -> int:
        """Send an echo request; return its sequence number. Raises OSError."""
        while self._sequence in self._waiting:
            self._sequence = (self._sequence + 1) & 0xFFFF
        sequence = self._sequence
        self._sequence = (sequence + 1) & 0xFFFF
        kind = _REQUEST[raw_socket.family]
        packet = _ECHO.pack(kind, 0, 0, self._identifier, sequence)
        if raw_socket.family == socket.AF_INET:  # the kernel computes that of ICMPv6
            packet = _ECHO.pack(kind, 0, _checksum(packet), self._identifier, sequence)
        raw_socket.sendto(packet, (ip, 0))
        self._waiting[sequence] = ip, time.perf_counter_ns(), reply
        return sequence

    def _receive_reply(self, raw_socket: socket.socket) -> None:
        try:
            data, (sender, *_) = raw_socket.recvfrom(2048)
        except OSError:  # an ICMP error of an earlier request; its probe times out
            return
        now = time.perf_counter_ns()
        message = data[(data[0] & 0xF) * 4 :] if raw_socket.family == socket.AF_INET else data
        if len(message) < _ECHO.size:
            return
        kind, _, _, identifier, sequence = _ECHO.unpack_from(message)
        waiting = self._waiting.get(sequence)
        if kind != _REPLY[raw_socket.family] or identifier != self._identifier or waiting is None:
            return
        ip, sent, reply = waiting
        if sender == ip and not reply.done():
            reply.set_result(now - sent)

    async def http(self, ip: str, port: int) -> Outcome:
        """Send GET /hello; return the time until status 200. Errors have the texts of Go's net/http."""
        host = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        started_at = time.perf_counter_ns()
        where = f'Get "http://{host}/hello": '
        try:
            with anyio.fail_after(PROBE_TIMEOUT):
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
    """An error of an HTTP request, with the text of Go's HTTP client."""


async def _get(ip: str, port: int, host: str) -> str:
    """Send GET /hello; return the status, such as ``200 OK``. Raises _GetError."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        answer, operation = b"", f"dial tcp {host}: connect"
        try:
            await loop.sock_connect(connection, (ip, port))
            operation = f"write tcp {_connection_text(connection)}: write"
            request = f"GET /hello HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            await loop.sock_sendall(connection, request.encode())
            operation = f"read tcp {_connection_text(connection)}: read"
            while b"\n" not in answer and len(answer) < 4096:
                if not (piece := await loop.sock_recv(connection, 4096)):
                    raise _GetError("EOF" if not answer else "unexpected EOF")
                answer += piece
        except OSError as error:
            raise _GetError(f"{operation}: {_error_text(error)}") from error
    line = answer.partition(b"\n")[0].removesuffix(b"\r").decode("latin-1")
    if (match := _STATUS_LINE.fullmatch(line)) is None:
        found = line[:_MAX_SHOWN].replace("\\", r"\\").replace('"', r"\"")
        broken = "net/http: HTTP/1.x transport connection broken: malformed HTTP response"
        raise _GetError(f'{broken} "{found}"')
    return match[1]


def _connection_text(connection: socket.socket) -> str:
    """Return both addresses of a connection: ``10.1.0.1:40000->10.1.0.2:4240``."""
    ends = (connection.getsockname(), connection.getpeername())
    return "->".join(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip, port, *_ in ends)


def _filter_replies(raw_socket: socket.socket) -> None:
    """Set an ICMP filter that passes only echo replies."""
    if raw_socket.family == socket.AF_INET:
        blocked = 0xFFFFFFFF & ~(1 << _REPLY[socket.AF_INET])
        raw_socket.setsockopt(_SOL_RAW, _ICMP_FILTER, struct.pack("=I", blocked))
    else:
        blocked_types = [0xFFFFFFFF] * 8
        word, bit = divmod(_REPLY[socket.AF_INET6], 32)
        blocked_types[word] &= ~(1 << bit)
        raw_socket.setsockopt(socket.IPPROTO_ICMPV6, _ICMPV6_FILTER, struct.pack("=8I", *blocked_types))


def _checksum(packet: bytes) -> int:
    """Return the Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(word for (word,) in struct.iter_unpack("!H", packet))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def _error_text(error: OSError) -> str:
    """Return the error as Go prints it: ``connection refused``."""
    return os.strerror(error.errno or errno.EIO).lower()
