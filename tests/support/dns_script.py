"""A DNS server that behaves, mostly badly, as the first label of the query's name demands.

``plain`` answers; ``slow`` answers late, ``silent`` never; ``forged`` sends answers with another id, to
another question and from another port before its own, over TCP with another id only; ``short`` truncates
answers over UDP; ``others`` has the address of ``web.example.org``; ``crossed`` answers another question;
``failed`` answers SERVFAIL with an address; ``unread`` FORMERR without the question; ``chain`` leads there by
eight names; ``loop`` leads in a circle; ``huge`` is as large as possible; ``pointer``, ``cut`` and ``noise``
are malformed.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

from hive.lab.children import Stop
from tests.support.dns import query

TRUE, LIE = "203.0.113.7", "203.0.113.66"
SLOW = 1.0
"""Delay of ``slow`` in seconds."""
LARGEST_UDP, LARGEST_TCP = 230, 4080
"""Addresses in an answer of some 3.7 KB and one of some 65 KB."""
_POINT = b"\xc0\x0c"  # to the question's name


def ask(server: str, name: str, patience: float = 20.0, *, tcp: bool = False, edns: int = 0) -> bytes:
    """Send one query from a port of its own and return the reply. Raises TimeoutError, OSError."""
    message = query(name)
    if edns:
        message = message[:11] + b"\1" + message[12:] + struct.pack(">BHHIH", 0, 41, edns, 0, 0)
    return send(server, message, patience, tcp=tcp)


def send(server: str, message: bytes, patience: float = 20.0, *, tcp: bool = False) -> bytes:
    """Send any message and return the reply. Raises TimeoutError, OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as client:
        client.settimeout(patience)
        client.connect((server, 53))
        if not tcp:
            client.send(message)
            return client.recv(65535)
        client.sendall(len(message).to_bytes(2, "big") + message)
        with client.makefile("rb") as stream:
            return stream.read(int.from_bytes(stream.read(2), "big"))


def addresses_of(answer: bytes) -> list[str]:
    """Return the addresses of a well-formed answer, compressed as this server does it."""
    at = answer.index(b"\0", 12) + 5
    found = []
    for _ in range(int.from_bytes(answer[6:8], "big")):
        kind, _, _, size = struct.unpack_from(">HHIH", answer, at + 2)
        if kind == 1:
            found.append(str(IPv4Address(answer[at + 12 : at + 16])))
        at += 12 + size
    return found


def served() -> bool:
    """Return whether queries are answered in this namespace, over UDP and TCP."""
    return all(_bound(protocol, 53) for protocol in ("udp", "tcp"))


def _bound(protocol: str, port: int) -> bool:
    lines = Path(f"/proc/net/{protocol}").read_text(encoding="utf-8").splitlines()[1:]
    return any(int(line.split()[1].rpartition(":")[2], 16) == port for line in lines)


def serve(stop: Stop) -> set[str]:
    """Serve until stopped, and record the addresses of clients."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere,
        socket.create_server(("0.0.0.0", 53)) as listener,
        selectors.DefaultSelector() as ready,
    ):
        datagrams.bind(("0.0.0.0", 53))
        for each in (datagrams, listener):
            ready.register(each, selectors.EVENT_READ)
        late: list[tuple[float, bytes, tuple[str, int]]] = []
        asked: set[str] = set()
        while not stop.wait(0):
            for key, _ in ready.select(0.02):
                if key.fileobj is listener:
                    connection, client = listener.accept()
                    asked.add(client[0])
                    with connection:
                        _converse(connection)
                    continue
                data, client = datagrams.recvfrom(4096)
                asked.add(client[0])
                for reply, wait, socket_ in _by_udp(data, datagrams, elsewhere):
                    if wait:
                        late.append((time.monotonic() + wait, reply, client))
                    else:
                        socket_.sendto(reply, client)
            for one in [one for one in late if one[0] < time.monotonic()]:
                late.remove(one)
                datagrams.sendto(one[1], one[2])
    return asked


def _converse(connection: socket.socket) -> None:
    connection.settimeout(2)
    try:
        with connection.makefile("rb") as stream:
            while size := stream.read(2):
                data = stream.read(int.from_bytes(size, "big"))
                if _does(data) == "silent":
                    continue
                answer = _answer(data, LARGEST_TCP)
                if _does(data) == "forged":
                    answer = bytes([answer[0] ^ 0xFF]) + answer[1:]
                connection.sendall(len(answer).to_bytes(2, "big") + answer)
    except OSError:
        return


def _does(data: bytes) -> str:
    return data[13 : 13 + data[12]].decode()


def _by_udp(
    data: bytes, own: socket.socket, elsewhere: socket.socket
) -> Iterator[tuple[bytes, float, socket.socket]]:
    """Return the reply, its delay in seconds, and the socket that sends it."""
    does, answer = _does(data), _answer(data, LARGEST_UDP)
    if does == "silent":
        return
    if does == "short":
        answer = answer[:2] + b"\x87" + answer[3:6] + b"\0\0" + answer[8 : data.index(b"\0", 12) + 5]
    if does == "forged":
        lie = answer.replace(IPv4Address(TRUE).packed, IPv4Address(LIE).packed)
        yield bytes([lie[0] ^ 0xFF]) + lie[1:], 0, own
        yield bytes([lie[0] ^ 0xFF]) + b"\xff" * 40, 0, own
        yield b"", 0, own
        yield lie.replace(b"\6forged", b"\6others"), 0, own
        yield lie, 0, elsewhere
    yield answer, SLOW if does == "slow" else 0, own


def _answer(data: bytes, many: int) -> bytes:
    does = _does(data)
    question = data[12 : data.index(b"\0", 12) + 5]
    one = _record(IPv4Address(TRUE).packed)
    records, count = one, 1
    if does == "huge":
        count = many
        records = b"".join(_record((0x0A640000 + number).to_bytes(4, "big")) for number in range(many))
    elif does == "others":
        owner = b"\3web\7example\3org\0"
        records = owner + _record(IPv4Address(LIE).packed)[2:]
    elif does == "crossed":
        question = question.replace(b"\7crossed", b"\7another")
    elif does in {"failed", "unread", "noise"}:
        return data[:2] + _whole(does, question)
    elif does == "chain":
        records, count = _chain(12 + len(question)) + one[2:], 9
    elif does == "loop":
        other = b"\5other\xc0\x11"
        records, count = _record(other, 5) + other[:6] + b"\xc0\x11" + _record(_POINT, 5)[2:], 2
    elif does == "pointer":
        at = 12 + len(question)
        records = struct.pack(">H", 0xC000 | at) + one[2:]
    elif does == "cut":
        records, count = one + one[:9], 2
    return data[:2] + struct.pack(">HHHHH", 0x8580, 1, count, 0, 0) + question + records


def _whole(does: str, question: bytes) -> bytes:
    """Return all of an answer except its id."""
    if does == "failed":
        return struct.pack(">HHHHH", 0x8582, 1, 1, 0, 0) + question + _record(IPv4Address(LIE).packed)
    if does == "unread":
        return struct.pack(">HHHHH", 0x8081, 0, 0, 0, 0)
    return b"\xff" * 40


def _chain(at: int) -> bytes:
    """Return eight aliases that begin there, and the owner of the record that follows."""
    owner, records = _POINT, b""
    for number in range(8):
        value = at + len(records) + 12
        records += owner + _record(b"\2c%d\xc0\x12" % number, 5)[2:]
        owner = struct.pack(">H", 0xC000 | value)
    return records + owner


def _record(value: bytes, kind: int = 1) -> bytes:
    return _POINT + struct.pack(">HHIH", kind, 1, 60, len(value)) + value
