"""A CNI server on a real socket over a fake node, and a client that speaks the plugin's protocol."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from cells.cni.attach import Attacher
from cells.cni.detach import Detacher, LinkTeardown
from cells.cni.protocol import ADDRESSED, PluginAction
from cells.cni.server import CallTimes, Checker, CniServer
from lifecycle import HealthTree, Lifecycle
from tests.support.cni_plugin import HEADER, environment
from tests.unit.cni_server.fakes import MTU, FakeNode


@dataclass(frozen=True)
class Reply:
    """The output that the plugin would print."""

    code: int
    stdout: bytes
    patch: int = 0
    """The action the agent requests of the plugin; 1 is IPv6 in the pod."""
    ports: str = ""
    """Ports that the plugin reserves in the pod before it prints."""

    @property
    def json(self) -> Any:
        """Return the result or error object."""
        return json.loads(self.stdout)

    @property
    def message(self) -> str:
        """Return the text of the error."""
        return str(self.json["msg"])


class Client:
    """One call of the plugin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)

    async def connect(self) -> None:
        """Connect."""
        await asyncio.get_running_loop().sock_connect(self._socket, str(self._path))

    def send(self, packet: bytes, fds: list[int]) -> None:
        """Send the request."""
        socket.send_fds(self._socket, [packet], fds)

    async def reply(self) -> Reply:
        """Wait for the reply; raises ConnectionError when there will be none."""
        with self._socket:
            packet = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 18)
        if not packet:
            raise ConnectionError("closed without an answer")
        magic, _, patch, code, length = HEADER.unpack_from(packet)
        assert magic == b"HCNI"
        rest = packet[HEADER.size :]
        assert len(rest) == length or patch == PluginAction.PORTS
        return Reply(code, rest[:length], patch, rest[length:].decode())

    def close(self) -> None:
        """Close the connection, as when the plugin dies."""
        self._socket.close()


def request(
    env: dict[str, str], stdin: bytes, *, version: int = 1, flags: int = 0, addresses: bytes = b""
) -> bytes:
    """Return a request packet; flag 1: an agent died during it; flag 2: it has addresses."""
    text = "".join(f"{name}={value}\0" for name, value in env.items()).encode()
    return HEADER.pack(b"HCNI", version, flags, len(text), len(stdin)) + text + stdin + addresses


class Harness:
    """The server, its node, and calls to it. A pod's namespace is a file with its name."""

    def __init__(self, folder: Path, *, delegated: bool = False) -> None:
        self.folder = folder
        self.reserved_ports = ""
        """Ports to reserve in new pods."""
        self.path = folder / "cni.sock"
        self.node = FakeNode()
        self.health = HealthTree()
        log = structlog.get_logger()
        lifecycle = Lifecycle("test")
        self.teardown = LinkTeardown(
            self.node, self.node, self.node, lifecycle=lifecycle, health=self.health.reporter("cni"), log=log
        )
        self.detacher = Detacher(self.node, self.teardown, log)
        attacher = Attacher(
            self.node,
            self.node,
            self.node,
            self.teardown,
            gateways=lambda: self.node.gateways,
            mtu=lambda: MTU,
            state=folder,
            log=log,
            delegated=delegated,
            reserved_ports=lambda: self.reserved_ports,
        )
        self.times = CallTimes()
        self.server = CniServer(
            self.path,
            attacher,
            self.detacher,
            Checker(self.node),
            self.node,
            self.node.open_pod,
            lifecycle=lifecycle,
            log=log,
            uids=(os.getuid(),),
            times=self.times,
        )

    def pod(self, name: str) -> int:
        """Return the cookie of a pod's namespace."""
        path = self.folder / name
        path.touch()
        return path.stat().st_ino

    async def begin(
        self,
        command: str,
        cid: str = "cid1",
        *,
        pod: str | None = "pod1",
        conf: dict[str, object] | None = None,
        flags: int = 0,
        addresses: object = None,
        **env: str,
    ) -> Client:
        """Send a request and do not wait; ``pod`` None sends no namespace."""
        stdin = {"cniVersion": "1.0.0", "name": "cilium", "type": "cilium-cni", **(conf or {})}
        variables = environment(
            command, CNI_CONTAINERID=cid, CNI_NETNS=f"/var/run/netns/{pod}" if pod else "", **env
        )
        client = Client(self.path)
        await client.connect()
        fds = []
        if pod is not None:
            self.pod(pod)
            fds = [os.open(self.folder / pod, os.O_RDONLY) for _ in range(2)]
        given = b"" if addresses is None else json.dumps(addresses).encode()
        flags |= ADDRESSED if given else 0
        client.send(request(variables, json.dumps(stdin).encode(), flags=flags, addresses=given), fds)
        for fd in fds:
            os.close(fd)
        return client

    async def call(
        self,
        command: str,
        cid: str = "cid1",
        *,
        pod: str | None = "pod1",
        conf: dict[str, object] | None = None,
        flags: int = 0,
        addresses: object = None,
        **env: str,
    ) -> Reply:
        """Send a request and wait for the reply; ``addresses``: the delegated plugin's output."""
        sent = await self.begin(command, cid, pod=pod, conf=conf, flags=flags, addresses=addresses, **env)
        return await sent.reply()


@asynccontextmanager
async def harness(folder: Path, *, delegated: bool = False) -> AsyncIterator[Harness]:
    """Run a harness; ``delegated``: of an agent that delegates IPAM to another plugin."""
    made = Harness(folder, delegated=delegated)
    async with made.teardown.running(), made.server.serving():
        yield made
