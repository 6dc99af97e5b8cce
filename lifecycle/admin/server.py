"""Commands over a unix socket: a line in, text out, an end mark.

Source: the shell of cilium/hive. Its protocol is used, so ``cilium-dbg shell`` can be the client: each line
        is a command, its output ends with a line ``<<end>>``, ``exit`` closes. Our extensions begin with #, a
        comment for their servers: after ``#marks``, the output of a command that fails ends with
        ``<<failed>>`` instead, and that of a command to repeat with ``--yes`` with ``<<confirm>>``;
        ``#complete LINE`` returns completions of the line's last word; after ``#width N``, tables are at most
        N columns wide.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from lifecycle.admin.script import (
    CommandError,
    Commands,
    ConfirmationNeededError,
    Engine,
    State,
    StopScript,
    builtin,
    help_command,
)
from lifecycle.errors import explain
from lifecycle.hints import Member
from lifecycle.hooks import Lifecycle
from lifecycle.process import Logger, listen, log_level, set_log_level
from lifecycle.process.acceptor import Acceptor
from lifecycle.process.health import Health

__all__ = ["CONFIRM", "END", "FAILED", "AdminServer", "AdminSocket"]

END, FAILED, CONFIRM = "<<end>>", "<<failed>>", "<<confirm>>"

_MARKS, _COMPLETE, _WIDTH = "#marks", "#complete ", "#width "
_LEAVE = frozenset({"exit", "quit", "stop"})
_SHELL = frozenset({"echo", "grep"})
"""The commands of scripts that are also available in a shell."""
_LONGEST_LINE = 1 << 16
_NARROWEST = 20
_UCRED = struct.Struct("iII")  # struct ucred of unix(7)


class AdminSocket(msgspec.Struct, frozen=True):
    """The path of the socket; empty for none. Its owner may connect, and a group if one is named."""

    path: Path | None
    group: str | None = None
    keeps: Mapping[str, str] = {}
    """Modules that ``hive/disable`` must not stop, each with the reason."""
    history: int = 0
    """Number of past moments of all tables that commands can show."""


class AdminServer:
    """Serves all clients in parallel; commands of one client run one after the other."""

    def __init__(
        self,
        commands: list[Member[Commands]],
        place: AdminSocket,
        lifecycle: Lifecycle,
        log: Logger,
        health: Health,
    ) -> None:
        own = [help_command(lambda: self.engine.commands)]
        own += [command for command in builtin() if command.name in _SHELL]
        self.engine = Engine([*own, *(command for contributed in commands for command in contributed)])
        self._place = place
        self._log = log
        self._health = health
        self._clients: set[asyncio.Task[None]] = set()
        if place.path is not None:
            lifecycle.enter("serve the admin socket", self._serving)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        path = self._place.path
        assert path is not None  # noqa: S101  # else there is no hook
        listener = listen(path, group=self._place.group)
        acceptor = Acceptor(listener, self._accepted, self._log, self._health)
        try:
            self._log.info("admin socket serves", socket=str(path))
            yield
        finally:
            acceptor.close()
            path.unlink(missing_ok=True)
            for client in self._clients:
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)

    def _accepted(self, connection: socket.socket, _peer: Hashable) -> None:
        client = _Client(self.engine, connection, self._log)
        task = asyncio.create_task(client.serve())
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        task.add_done_callback(lambda _: client.close())


class _Client:
    """One connection."""

    def __init__(self, engine: Engine, connection: socket.socket, log: Logger) -> None:
        self._engine = engine
        self._connection = connection
        self._peer = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self._log = log
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._marks = False
        self._disconnected = asyncio.Event()
        """Set when the client sends nothing more: endless commands end."""
        self._state = State(write=self._write)

    async def serve(self) -> None:
        """Run lines until the client exits or disconnects, or this is cancelled."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(
                sock=self._connection, limit=_LONGEST_LINE
            )
            await self._answer_all()
            self._writer.close()
            await self._writer.wait_closed()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has disconnected, or the server stops

    def close(self) -> None:
        """Close the connection; unread output is lost."""
        if self._writer is None:
            self._connection.close()
        else:
            self._writer.transport.abort()

    async def _answer_all(self) -> None:
        lines: asyncio.Queue[str | None] = asyncio.Queue(maxsize=100)
        reading = asyncio.create_task(self._read(lines))
        try:
            while (line := await lines.get()) is not None and line.strip() not in _LEAVE:
                await self._answer(line.rstrip("\r\n"))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, lines: "asyncio.Queue[str | None]") -> None:
        try:
            while line := await self._reader.readline():
                await lines.put(line.decode(errors="replace"))
        except (ConnectionError, ValueError):  # the client disconnected, or sends an endless line
            pass
        self._disconnected.set()
        await lines.put(None)

    async def _answer(self, line: str) -> None:
        mark = END
        if line == _MARKS:
            self._marks = True
        elif line.startswith(_COMPLETE):
            for word in self._engine.complete(line.removeprefix(_COMPLETE)):
                await self._write(f"{word}\n")
        elif line.startswith(_WIDTH) and (width := line.removeprefix(_WIDTH)).isdecimal():
            self._state.width = max(int(width), _NARROWEST)
        else:
            mark = await self._run(line)
        await self._write(f"{mark if self._marks else END}\n")

    async def _run(self, line: str) -> str:
        """Run a command, an endless one until the client disconnects. Returns the mark for its result."""
        called = self._engine.called(line)
        changes = called.changes if called is not None else None
        before = changes() if changes is not None else ""
        level = log_level()
        try:
            return await self._result(line)
        finally:
            if changes is not None and (now := changes()) != before:
                self._audit(line, before, now, level)

    def _audit(self, line: str, before: str, now: str, level: str) -> None:
        """Log a change, even if it reduces the log level."""
        pid, uid, _ = self._peer
        chosen = log_level()
        set_log_level(level)
        try:
            self._log.info("changed through the shell", command=line, old=before, new=now, uid=uid, pid=pid)
        finally:
            set_log_level(chosen)

    async def _result(self, line: str) -> str:
        command = asyncio.create_task(self._engine.line(self._state, line))
        disconnected = asyncio.create_task(self._disconnected.wait())
        try:
            await asyncio.wait({command, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if self._engine.is_endless(line):
                command.cancel()
            await asyncio.wait({command})
        finally:
            disconnected.cancel()
            command.cancel()
            await asyncio.wait({command})
        error = None if command.cancelled() else command.exception()
        if error is None or isinstance(error, StopScript):
            return END
        if isinstance(error, ConnectionError):
            raise error
        await self._write(f"{self._message(line, error)}\n")
        return CONFIRM if isinstance(error, ConfirmationNeededError) else FAILED

    def _message(self, line: str, error: BaseException) -> str:
        if isinstance(error, CommandError):
            return str(error)
        if (text := explain(error)) is not None:
            return text
        self._log.error("command failed", command=line, exc_info=error)
        return f"{type(error).__name__}: {error}; the log of the process has more"

    async def _write(self, text: str) -> None:
        assert self._writer is not None  # noqa: S101  # only called while it serves
        self._writer.write(text.encode())
        await self._writer.drain()
