"""A real DNS server, and lookups without retries."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address

import pytest

from hive.lab.namespaces import Namespaces

TYPES = {4: 1, 6: 28}


_ANY = ("#/192.0.2.250", "#/2001:db8::250")
"""Addresses of both families, since dnsmasq refuses a query without a matching record."""


@contextmanager
def dnsmasq(where: Namespaces, *records: str, ttl: int = 300) -> Iterator[None]:
    """Run a server on every address of a namespace; a record is ``NAME/ADDRESS`` and covers names below NAME.

    All other names have an address, too: only a proxy before the server refuses some.
    """
    program = shutil.which("dnsmasq") or "/usr/sbin/dnsmasq"
    if not shutil.which(program):
        pytest.fail("dnsmasq is not there: install Debian's dnsmasq-base")
    quiet = [
        "--no-resolv",
        "--no-hosts",
        "--no-daemon",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--user=root",
    ]
    answers = [f"--address=/{record}" for record in (*records, *_ANY)]
    command = [program, *quiet, "--port=53", f"--local-ttl={ttl}", *answers]
    with where.popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Looked:
    """The result of a lookup."""

    code: int
    addresses: tuple[str, ...]
    seconds: float


def query(name: str, version: int = 4, number: int = 7) -> bytes:
    """Return a query for a name's addresses."""
    labels = b"".join(bytes([len(one)]) + one.encode() for one in name.rstrip(".").split("."))
    return (
        struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0)
        + labels
        + struct.pack(">BHH", 0, TYPES[version], 1)
    )


def lookup(server: str, name: str, patience: float = 10.0, *, tcp: bool = False, version: int = 4) -> Looked:
    """Send one query. Raises TimeoutError, OSError."""
    asked = query(name, version)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    began = time.perf_counter()
    with socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as client:
        client.settimeout(patience)
        client.connect((server, 53))
        if tcp:
            client.sendall(len(asked).to_bytes(2, "big") + asked)
            size = int.from_bytes(client.recv(2), "big")
            data = b""
            while len(data) < size:
                data += client.recv(size - len(data))
        else:
            client.send(asked)
            data = client.recv(65535)
    took = time.perf_counter() - began
    return Looked(data[3] & 0xF, tuple(_addresses(data, len(asked))), took)


def _addresses(data: bytes, at: int) -> Iterator[str]:
    for _ in range(int.from_bytes(data[6:8], "big")):
        while data[at] and data[at] < 0xC0:
            at += data[at] + 1
        at += 2 if data[at] else 1
        kind, _, _, size = struct.unpack_from(">HHIH", data, at)
        at += 10
        if kind in TYPES.values():
            yield str(ip_address(data[at : at + size]))
        at += size
