"""A port that another program uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hive.lab.children import Stop
from hive.lab.node import Lab
from tests.support.waiting import eventually


def listen(stop: Stop, family: int, kind: int, address: str | tuple[str, int]) -> None:
    with socket.socket(family, kind) as server:
        server.bind(address)
        server.listen()
        stop.wait(600)


@contextmanager
def listening(node: Lab, family: int, kind: int, address: str | tuple[str, int]) -> Iterator[None]:
    with node.open() as inside:
        other = inside.start(listen, family, kind, address)
        if isinstance(address, str):
            eventually(lambda: inside.run(os.path.exists, address))
        else:
            eventually(lambda: inside.run(listens, address[1]))
        try:
            yield
        finally:
            other.kill()


def listens(port: int) -> bool:
    return f":{port:04X} " in Path("/proc/net/tcp").read_text()
