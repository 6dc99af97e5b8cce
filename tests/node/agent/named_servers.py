"""Servers that answer with their name, and a client in the node's cgroup."""

from __future__ import annotations

import socket
from pathlib import Path

from hive.lab.children import Child
from hive.lab.namespaces import Namespaces, inside
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.requests import RequestResults, answer
from hive.lab.traffic.requests import send_requests as request
from tests.node.agent.node_ports import TARGET
from tests.support.cgroups import join


def served(
    place: Namespaces, name: str, family: socket.AddressFamily = socket.AF_INET, port: int = TARGET
) -> Child[int]:
    with inside(place):
        listener = tcp_listener(family, port)
    with listener:
        return place.start(answer, listener, name)


ASKED = 32
"""Requests of each client: of two servers, both answer some."""


def joined(group: Path, ip: str, port: int) -> RequestResults:
    """Join the cgroup and send requests."""
    join(group)
    return request((ip, port), ASKED)
