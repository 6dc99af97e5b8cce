"""``pods/exec`` over a WebSocket: commands of containers, run by the stand-in of the kubelet.

Source: k8s.io/apimachinery/pkg/util/remotecommand, v4.channel.k8s.io; recorded shapes of its Status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
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
    has_input: bool = False


class Ended(NamedTuple):
    """How it went."""

    code: int
    out: bytes
    err: bytes


Executor = Callable[[Command], Awaitable[Ended]]
Conversation = Callable[
    [Command, "asyncio.Queue[bytes | None]", Callable[[bytes], Awaitable[None]]], Coroutine[None, None, Ended]
]
"""A command with input: what it is given comes by the queue, None at its end; what it prints goes out."""
PART = 32 * 1024
"""Bytes of a message, as kubelets send them."""


async def serve_exec(
    request: Request,
    command: Command,
    run: Executor,
    converse: Conversation | None,
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Accept the WebSocket, run the command, send what it printed and its status, close."""
    reader, stream = streams
    protocol = WSConnection(ConnectionType.SERVER)
    head = f"{request.method} {request.target} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers)
    protocol.receive_data(f"{head}\r\n".encode("latin-1"))
    (asked,) = protocol.events()
    assert isinstance(asked, Asked)
    assert PROTOCOL in asked.subprotocols
    stream.write(protocol.send(AcceptConnection(subprotocol=PROTOCOL)))
    if command.has_input and converse is not None:
        ended = await _conversed(protocol, command, converse, reader, stream)
        if ended is None:
            return
    else:
        ended = await run(command)
    for channel, data in ((1, ended.out), (2, ended.err)):
        for begin in range(0, len(data), PART):
            message = bytes((channel,)) + data[begin : begin + PART]
            stream.write(protocol.send(BytesMessage(message)))
            await stream.drain()
    stream.write(protocol.send(BytesMessage(b"\x03" + json.dumps(status_of(ended.code)).encode())))
    stream.write(protocol.send(CloseConnection(code=1000)))
    await stream.drain()


async def _conversed(
    protocol: WSConnection,
    command: Command,
    converse: Conversation,
    reader: asyncio.StreamReader,
    stream: asyncio.StreamWriter,
) -> Ended | None:
    """The command's end; None where the client closed the connection first."""
    received: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def say(data: bytes) -> None:
        for begin in range(0, len(data), PART):
            stream.write(protocol.send(BytesMessage(b"\x01" + data[begin : begin + PART])))
        await stream.drain()

    running = asyncio.ensure_future(converse(command, received, say))
    try:
        while True:
            reading = asyncio.ensure_future(reader.read(65536))
            await asyncio.wait([running, reading], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                reading.cancel()
                return running.result()
            data = reading.result()
            if data:
                protocol.receive_data(data)
            events = list(protocol.events()) if data else [CloseConnection(code=1006)]
            for event in events:
                if isinstance(event, BytesMessage) and event.data[:1] == b"\x00":
                    received.put_nowait(bytes(event.data[1:]))
                elif isinstance(event, CloseConnection):
                    return None
    finally:
        received.put_nowait(None)
        await running


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
    return Command(
        namespace, pod, query.get("container", [""])[0], query.get("command", []), "stdin" in query
    )


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


def conversing_program(program: str) -> Conversation:
    """Commands with input run as those without do."""

    async def run(
        command: Command, received: asyncio.Queue[bytes | None], say: Callable[[bytes], Awaitable[None]]
    ) -> Ended:
        process = await asyncio.create_subprocess_exec(
            program,
            *(command.namespace, command.pod, command.container, *command.words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        to_it = process.stdin
        assert to_it is not None
        assert process.stdout is not None
        assert process.stderr is not None

        async def give() -> None:
            while (line := await received.get()) is not None:
                to_it.write(line)
            to_it.close()

        giving = asyncio.ensure_future(give())
        while data := await process.stdout.read(65536):
            await say(data)
        err = await process.stderr.read()
        code = await process.wait()
        giving.cancel()
        return Ended(code, b"", err)

    return run
