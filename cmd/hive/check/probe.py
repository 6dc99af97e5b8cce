"""``hive probe``: what runs in the pods of a check: a server that names itself, and a client that tries it.

Why one program: a check needs nothing in its pods but the agent's image, which every node has.
Source: ip(7), ipv6(7): IP_MTU_DISCOVER, IP_MTU; with IP_PMTUDISC_PROBE no router and no kernel fragments.
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
"""Seconds for which one attempt waits for an answer."""
BULK: Final = 256 * 1024
"""Bytes that a bulk transfer sends, and gets back."""
_PAUSE: Final = 0.1
_ECHO: Final = b"echo:"
"""What a datagram begins with that is sent back as it came."""
_ECHO_STREAM: Final = b"e"
_HEADERS: Final = {4: 20 + 8, 6: 40 + 8}
"""Bytes of IP and UDP before what is sent."""
_LEAST: Final = {4: 576, 6: 1280}
"""Bytes of a packet that every link takes: RFC 791, RFC 8200."""
_PROBE: Final = 3
"""IP_PMTUDISC_PROBE: Don't Fragment is set, and the path's MTU as the kernel learned it is not used."""
_IP_MTU_DISCOVER, _IP_MTU = 10, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU = 23, 24


class Try(TypedDict):
    """What a client tries, until it goes as expected or the time is over."""

    kind: Kind
    to: str
    """An address; for ``name`` a DNS name."""
    port: int
    answers: bool
    """Whether an answer is expected; else that there is none."""
    within: float
    """Seconds."""


class Answer(NamedTuple):
    """How a try went."""

    ok: bool
    """Whether as expected."""
    who: str = ""
    """What the server calls itself; for ``name`` the addresses of the name."""
    why: str = ""
    """What went otherwise."""


# The server


class Server:
    """Answers on TCP and UDP ports, of every address and both families, until it is closed."""

    def __init__(self, name: str, ports: Sequence[int]) -> None:
        """Bind. Raises OSError when a port is taken, or the host has no family at all."""
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
        """Serve, in threads that end with the process or with close()."""
        for sock in self._sockets:
            serve = self._accept if sock.type == socket.SOCK_STREAM else self._datagrams
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
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
        """Name itself; then send back what comes."""
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
            with contextlib.suppress(OSError):  # larger than the way back takes: the client learns by silence
                sock.sendto(data if data.startswith(_ECHO) else self._name, peer)


# The client


def attempt(tries: Sequence[Try]) -> list[Answer]:
    """Try all of them at once; how each went, in their order."""
    if not tries:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(tries))) as pool:
        return list(pool.map(_attempt, tries))


def _attempt(one: Try) -> Answer:
    """Until it goes as expected, or the time is over."""
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
    """Raises OSError where nothing answers."""
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
    """Send so many bytes and get them back: segments as large as the path takes. Raises OSError."""
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
    """What comes back for a datagram. Raises OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(patience)
        sock.connect(address)
        sock.send(data)
        return sock.recv(1 << 16)


def _largest(address: tuple[str, int]) -> Answer:
    """Whether packets as large as the route allows go there and back. Raises OSError where none does."""
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
    """Whether a packet of so many bytes goes there and back; one may be lost."""
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
    """Bytes of a packet that the route of a connected socket takes."""
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if version == 6 else (socket.IPPROTO_IP, _IP_MTU)
    return sock.getsockopt(level, option)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


# The command


@click.group()
def command() -> None:
    """Be the server or the client in a pod of hive check; of use to scripts, too."""


@command.command()
@click.option("--name", default=socket.gethostname, help="What it calls itself.", show_default="host name")
@click.option("--port", "ports", type=click.IntRange(1, 65535), multiple=True, required=True)
def serve(name: str, ports: tuple[int, ...]) -> None:
    """Answer on TCP and UDP ports with a name and an echo, until SIGTERM."""
    over = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)  # as process 1 of a container it has no default
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
    """Connect to servers, all at once, and print each result.

    JSON is a list of objects: kind (tcp, udp, mtu, bulk, connect or name), to, port, answers, within
    (seconds).
    """
    try:
        wanted: list[Any] = json.loads(tries)
        checked = [_checked(one) for one in wanted]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise click.UsageError(f"{error!r}: expected a list of tries in JSON") from error
    click.echo(json.dumps(attempt(checked)))


def _checked(one: Any) -> Try:
    if one["kind"] not in KINDS:
        raise ValueError(f"kind {one['kind']!r}")
    return Try(
        kind=one["kind"],
        to=str(one["to"]),
        port=int(one.get("port", 0)),
        answers=bool(one.get("answers", True)),
        within=float(one.get("within", PATIENCE)),
    )
