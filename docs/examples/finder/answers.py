"""Answers on a unix socket: a word comes in, the names of the notes that have it go out.

Try it: echo milk | nc -U finder.sock
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from finder.folder import Note
from lifecycle import Lifecycle, Logger, Settings, Table, config, invoke, module, provide

LONGEST = 200
"""Bytes of a question."""


class AnswerSettings(Settings, frozen=True):
    """Settings of the answers cell."""

    socket: Path = Path("finder.sock")
    """Path of the socket."""


class Answers:
    """Serves the socket while its hook runs; it starts once the notes have been read."""

    def __init__(
        self, settings: AnswerSettings, notes: Table[str, Note], lifecycle: Lifecycle, log: Logger
    ) -> None:
        self._path = settings.socket
        self._words = notes.by("word")
        self._log = log
        lifecycle.enter("serve the socket", self.serving)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The socket, there inside."""
        async with (
            await anyio.create_unix_listener(self._path) as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, self._answer)
            self._log.info("answering", socket=str(self._path))
            try:
                yield
            finally:
                group.cancel_scope.cancel()
                self._path.unlink(missing_ok=True)

    async def _answer(self, client: SocketStream) -> None:
        async with client:
            try:
                asked = await BufferedByteReceiveStream(client).receive_until(b"\n", LONGEST)
            except (anyio.IncompleteRead, anyio.DelimiterNotFound):
                return
            word = asked.decode(errors="replace").strip().lower()
            names = sorted(note.name for note in self._words.get(word))
            await client.send("".join(f"{name}\n" for name in names).encode() or b"(none)\n")


cell = module("answers", "Answers on a socket", config(AnswerSettings), provide(Answers), invoke(Answers))
