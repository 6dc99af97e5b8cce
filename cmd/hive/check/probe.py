"""``hive probe``: the program in the pods of a check: a server that returns its name, and a client.

It is part of the agent's image, which every node has, so checks need no other image. Source: ip(7), ipv6(7):
IP_MTU_DISCOVER, IP_MTU; with IP_PMTUDISC_PROBE neither routers nor the kernel fragment.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Final, Literal, NamedTuple, TypedDict

import click

Kind = Literal["tcp", "udp", "mtu", "bulk", "connect", "name"]
KINDS: Final = ("tcp", "udp", "mtu", "bulk", "connect", "name")
PATIENCE: Final = 1.0
"""Timeout of one attempt in seconds."""
BULK: Final = 256 * 1024
"""Size of a bulk transfer in bytes, in each direction."""
_PAUSE: Final = 0.1
_ECHO: Final = b"echo:"
"""Prefix of datagrams that the server echoes."""
_ECHO_STREAM: Final = b"e"
_HEADERS: Final = {4: 20 + 8, 6: 40 + 8}
"""Size of the IP and UDP headers in bytes."""
_LEAST: Final = {4: 576, 6: 1280}
"""Packet size in bytes that every link supports: RFC 791, RFC 8200."""
_PROBE: Final = 3
"""IP_PMTUDISC_PROBE: sets Don't Fragment and ignores the kernel's cached path MTU."""
_IP_MTU_DISCOVER, _IP_MTU = 10, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU = 23, 24


class Try(TypedDict):
    """An attempt of the client, repeated until the expected result or the deadline."""

    kind: Kind
    to: str
    """An address; for ``name`` a DNS name."""
    port: int
    answers: bool
    """Whether an answer is expected, or none."""
    within: float
    """Deadline in seconds."""


class Answer(NamedTuple):
    """The result of a try."""

    ok: bool
    """Whether the result is the expected one."""
    who: str = ""
    """The server's name; for ``name`` the addresses of the name."""
    why: str = ""
    """The unexpected result."""


# The server


class Server:
    """Answers on TCP and UDP ports of all addresses and both families, until it is closed."""

    def __init__(self, name: str, ports: Sequence[int]) -> None:
        """Bind. Raises OSError if a port is in use, or the host has neither family."""
        self._name = name.encode() + b"\n"
        self._sockets: list[socket.socket] = []
        try:
            for port in ports:
                self._bind(port)
        except OSError:
            self.close()
            raise

    def _bind(self, port: int) -> None:
        absent: OSError | None = None
        bound = 0
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                try:
                    self._open(family, kind, address, port)
                    bound += 1
                except OSError as error:
                    if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                        raise
                    absent = error
        if not bound and absent is not None:
            raise absent

    def _open(self, family: int, kind: int, address: str, port: int) -> None:
        sock = socket.socket(family, kind)
        self._sockets.append(sock)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            _never_fragment(sock, 6 if family == socket.AF_INET6 else 4)
        sock.bind((address, port))
        if kind == socket.SOCK_STREAM:
            sock.listen(64)

    def start(self) -> None:
        """Serve in threads that end with the process or with close()."""
        for sock in self._sockets:
            serve = self._accept if sock.type == socket.SOCK_STREAM else self._datagrams
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        for sock in self._sockets:
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._stream, args=(sock,), daemon=True).start()

    def _stream(self, sock: socket.socket) -> None:
        """Send the name; then echo."""
        with sock, contextlib.suppress(OSError):
            sock.settimeout(30)
            sock.sendall(self._name)
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    def _datagrams(self, sock: socket.socket) -> None:
        while True:
            try:
                data, peer = sock.recvfrom(1 << 16)
            except OSError:
                return
            with contextlib.suppress(OSError):  # exceeds the return path: the client gets no answer
                sock.sendto(data if data.startswith(_ECHO) else self._name, peer)


# The client


def attempt(tries: Sequence[Try]) -> list[Answer]:
    """Run all tries in parallel; return the results in their order."""
    if not tries:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(tries))) as pool:
        return list(pool.map(_attempt, tries))


def _attempt(one: Try) -> Answer:
    """Repeat a try until the expected result or the deadline."""
    until = time.monotonic() + one["within"]
    while True:
        began = time.monotonic()
        try:
            answer = _once(one)
        except OSError as error:
            answer = Answer(not one["answers"], why=_reason(error))
        else:
            if not one["answers"]:
                answer = Answer(False, answer.who, "it answers, and should not")
        if answer.ok or time.monotonic() >= until:
            return answer
        time.sleep(max(0.0, _PAUSE - (time.monotonic() - began)))


def _once(one: Try) -> Answer:
    """Try once. Raises OSError without an answer."""
    if one["kind"] == "name":
        return _name(one["to"])
    address = (one["to"], one["port"])
    if one["kind"] == "udp":
        return Answer(True, _datagram(address, b"who are you?", PATIENCE).decode().strip())
    if one["kind"] == "mtu":
        return _largest(address)
    with socket.create_connection(address, timeout=PATIENCE) as sock:
        if one["kind"] == "connect":
            return Answer(True)
        who = _line(sock)
        if one["kind"] == "bulk":
            _transfer(sock)
        return Answer(True, who)


def _name(name: str) -> Answer:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(None, error.strerror or str(error)) from error
    return Answer(True, " ".join(sorted({str(address[0]) for *_, address in found})))


def _line(sock: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        part = sock.recv(256)
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        data += part
        if len(data) > 512:
            raise OSError(None, "another program answers there")
    return data.decode(errors="replace").strip()


def _transfer(sock: socket.socket) -> None:
    """Send bytes and receive them back, in segments as large as the path allows. Raises OSError."""
    block = _ECHO_STREAM * (1 << 14)
    for _ in range(BULK // len(block)):
        sock.sendall(block)
        left = len(block)
        while left:
            part = sock.recv(left)
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            left -= len(part)


def _datagram(address: tuple[str, int], data: bytes, patience: float) -> bytes:
    """Return the answer to a datagram. Raises OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(patience)
        sock.connect(address)
        sock.send(data)
        return sock.recv(1 << 16)


def _largest(address: tuple[str, int]) -> Answer:
    """Whether packets of the route's MTU pass in both directions. Raises OSError if none passes."""
    version = 6 if ":" in address[0] else 4
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        _never_fragment(sock, version)
        sock.connect(address)
        wanted = _route_mtu(sock, version)
        if _passes(sock, wanted, version):
            return Answer(True, str(wanted))
        low, high = _LEAST[version], wanted
        if not _passes(sock, low, version):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        while high - low > 1:  # low passes, high does not
            middle = (low + high) // 2
            low, high = (middle, high) if _passes(sock, middle, version) else (low, middle)
        return Answer(False, why=f"the pod's MTU is {wanted}, but packets of more than {low} bytes are lost")


def _passes(sock: socket.socket, size: int, version: int) -> bool:
    """Whether a packet of this size passes in both directions; one may be lost."""
    for number in range(2):
        data = _ECHO + bytes((number,)) + size.to_bytes(4)
        data += bytes(size - _HEADERS[version] - len(data))
        sock.settimeout(PATIENCE / 2)
        try:
            sock.send(data)
            while sock.recv(1 << 16) != data:
                pass
        except OSError:
            continue
        return True
    return False


def _never_fragment(sock: socket.socket, version: int) -> None:
    if version == 6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)


def _route_mtu(sock: socket.socket, version: int) -> int:
    """Return the MTU of a connected socket's route."""
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if version == 6 else (socket.IPPROTO_IP, _IP_MTU)
    return sock.getsockopt(level, option)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


# The command


@click.group()
def command() -> None:
    """Run the server or the client of hive check, in its pods; also usable in scripts."""


@command.command()
@click.option("--name", default=socket.gethostname, help="Name in its answers.", show_default="host name")
@click.option("--port", "ports", type=click.IntRange(1, 65535), multiple=True, required=True)
def serve(name: str, ports: tuple[int, ...]) -> None:
    """Answer on TCP and UDP ports with a name and an echo, until SIGTERM."""
    over = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)  # process 1 of a container has no default action
    try:
        server = Server(name, ports)
    except OSError as error:
        numbers = " ".join(map(str, ports))
        raise click.ClickException(f"ports {numbers}: {_reason(error)}: choose others with --port") from error
    server.start()
    over.wait()
    server.close()


@command.command("try")
@click.argument("tries", metavar="JSON")
def try_(tries: str) -> None:
    """Connect to servers in parallel, and print each result.

    JSON is a list of objects: kind (tcp, udp, mtu, bulk, connect or name), to, port, answers, within
    (seconds).
    """
    try:
        wanted: Any = json.loads(tries)
        checked = [_checked(one) for one in wanted] if isinstance(wanted, list) else None
    except (ValueError, TypeError) as error:
        raise click.UsageError(f"JSON: {error}") from error
    if checked is None:
        raise click.UsageError(f"JSON: expected a list of objects, not {tries}")
    click.echo(json.dumps(attempt(checked)))


def _checked(one: Any) -> Try:
    if not isinstance(one, dict) or "to" not in one:
        raise ValueError(f"expected an object with kind and to, not {json.dumps(one)}")
    if one.get("kind") not in KINDS:
        raise ValueError(f"kind {one.get('kind')}: expected one of {', '.join(KINDS)}")
    return Try(
        kind=one["kind"],
        to=str(one["to"]),
        port=int(one.get("port", 0)),
        answers=bool(one.get("answers", True)),
        within=float(one.get("within", PATIENCE)),
    )
