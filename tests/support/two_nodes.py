"""Two nodes of the lab with a pod each, connected by a tunnel or routes, and etcd."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest
from click.testing import CliRunner

from hive.client import ask
from hive.lab import agent_process
from hive.lab.children import Stop
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.node import ROOT, Lab, exclusive
from hive.lab.traffic.probe import ping
from hive.main import cli
from tests.support.etcd import installed
from tests.support.namespaces import need_root

_GRACE: Final = "--identity-change-grace-period=1s"
_UPLINK, _ETH_P_ALL = "uplink", 3
OUTSIDE: Final = {4: "192.168.50.1", 6: "fd50:1::1"}
"""Addresses of the host beside the nodes, by family."""
SETTINGS: Final = (TUNNEL, _GRACE)
"""Settings of their agents."""


def hive(*arguments: str) -> str:
    """Run the command, which must succeed; return its output."""
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@contextmanager
def joined_by_etcd(name: str, *settings: str, tunnel: bool = True) -> Iterator[Cluster]:
    """Create nodes ``<name>-1`` and ``<name>-2`` with these settings added; without ``tunnel``, native
    routing.
    """
    need_root()
    if not installed():
        pytest.fail("etcd is not installed: install Debian's etcd-server")
    cluster = Cluster(name)
    up = ["lab", "up", "--name", f"{name}-1", "--nodes", "2", "--pods", "1", "--etcd"]
    up += ["--tunnel"] * tunnel
    try:
        hive(*up, _GRACE, *settings)
        yield cluster
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())
    assert not list(ROOT.glob(f"{name}*"))


def asked(lab: Lab, path: str) -> Any:
    """Return the answer of the node's agent to a path of its API."""
    pid = agent_process.running(lab)
    assert pid is not None
    return ask(path, agent_process.api_socket(pid))


def captured(stop: Stop) -> list[bytes]:
    """Capture every packet on the node's link during the block."""
    found: list[bytes] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as link:
        link.bind((_UPLINK, 0))
        link.settimeout(0.05)
        while not stop.wait(0):
            with suppress(TimeoutError):
                found.append(link.recv(1 << 16))
    return found


def address(lab: Lab) -> str:
    """Return the address of the node's pod."""
    endpoints = [one["status"] for one in asked(lab, "/v1/endpoint")]
    (pod,) = (one for one in endpoints if one["external-identifiers"].get("pod-name"))
    return str(pod["networking"]["addressing"][0]["ipv4"])


def reaches(lab: Lab, pod: str, target: str) -> bool:
    """Return whether a ping from a pod gets a reply."""
    with lab.open_pod(pod) as namespaces:
        return bool(namespaces.run(ping, target, 1))
