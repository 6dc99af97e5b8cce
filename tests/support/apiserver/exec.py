"""``pods/exec`` over a WebSocket: commands of containers, run by whoever plays the kubelet.

Source: k8s.io/apimachinery/pkg/util/remotecommand, v4.channel.k8s.io; recorded shapes of its Status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection
from wsproto.events import Request as Asked

from tests.support.apiserver.wire import Request

PROTOCOL = "v4.channel.k8s.io"


class Command(NamedTuple):
    """What is to be run, and where."""

    namespace: str
    pod: str
    container: str
    words: list[str]


class Ended(NamedTuple):
    """How it went."""

    code: int
    out: bytes
    err: bytes


Executor = Callable[[Command], Awaitable[Ended]]
PART = 32 * 1024
"""Bytes of a message, as kubelets send them."""


async def serve_exec(request: Request, command: Command, run: Executor, stream: asyncio.StreamWriter) -> None:
    """Accept the WebSocket, run the command, send what it printed and its status, close."""
    protocol = WSConnection(ConnectionType.SERVER)
    head = f"{request.method} {request.target} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers)
    protocol.receive_data(f"{head}\r\n".encode("latin-1"))
    (asked,) = protocol.events()
    assert isinstance(asked, Asked)
    assert PROTOCOL in asked.subprotocols
    stream.write(protocol.send(AcceptConnection(subprotocol=PROTOCOL)))
    ended = await run(command)
    for channel, data in ((1, ended.out), (2, ended.err)):
        for begin in range(0, len(data), PART):
            message = bytes((channel,)) + data[begin : begin + PART]
            stream.write(protocol.send(BytesMessage(message)))
            await stream.drain()
    stream.write(protocol.send(BytesMessage(b"\x03" + json.dumps(status_of(ended.code)).encode())))
    stream.write(protocol.send(CloseConnection(code=1000)))
    await stream.drain()


def status_of(code: int) -> dict[str, object]:
    """The Status that ends a command."""
    if not code:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def command_of(request: Request, namespace: str, pod: str) -> Command:
    """What a request asks for."""
    query = parse_qs(urlsplit(request.target).query)
    return Command(namespace, pod, query.get("container", [""])[0], query.get("command", []))


def by_program(program: str) -> Executor:
    """Commands run as ``PROGRAM NAMESPACE POD CONTAINER COMMAND...``."""

    async def run(command: Command) -> Ended:
        process = await asyncio.create_subprocess_exec(
            program,
            *(command.namespace, command.pod, command.container, *command.words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return Ended(process.returncode or 0, out, err)

    return run
