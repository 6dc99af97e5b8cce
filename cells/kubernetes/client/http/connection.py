"""One connection to a server: a request, its answer, and the next one.

Needs: a Stream.   Gives: Connection.
"""

from __future__ import annotations

import ssl

import anyio

from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.client.http.answer import Incoming
from cells.kubernetes.client.http.streams import Stream


class Connection:
    """Carries one request at a time."""

    def __init__(self, server: str, stream: Stream) -> None:
        self.server = server
        self.idle_since = 0.0
        """In seconds of the monotonic clock."""
        self._stream = stream
        self._answer = Incoming()
        self._quiet: float | None = None

    @property
    def answer(self) -> Incoming:
        """The answer that comes in."""
        return self._answer

    @property
    def reusable(self) -> bool:
        """Whether its answer was read to the end, and the server keeps it open."""
        return self._answer.complete and self._answer.kept

    @property
    def stale(self) -> bool:
        """Whether the server has let go of it while it was idle."""
        return self._stream.readable

    async def ask(self, message: bytes, *, within: float, quiet: float | None) -> Incoming:
        """Send a request within so many seconds, and read the head of its answer.

        Parts of the answer may be ``quiet`` seconds apart. Raises UnreachableError.
        """
        self._answer = answer = Incoming()
        self._quiet = quiet
        try:
            with anyio.fail_after(within):
                await self._stream.send(message)
        except TimeoutError as error:
            raise UnreachableError(f"the request could not be sent within {within:g} s") from error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # a server may refuse before it has read all: then its answer says why, or that it is gone
        while not answer.begun:
            await self._more()
        return answer

    async def part(self) -> bytes:
        """What has come of the body since; nothing when it is complete. Raises UnreachableError."""
        answer = self._answer
        while not answer.parts and not answer.complete:
            await self._more()
        found = answer.parts[0] if len(answer.parts) == 1 else b"".join(answer.parts)
        answer.parts.clear()
        return found

    async def rest(self) -> bytes:
        """All that is left of the body. Raises UnreachableError."""
        answer = self._answer
        while not answer.complete:
            await self._more()
        return await self.part()

    async def aclose(self) -> None:
        """Break it off."""
        self._answer.kept = False
        await self._stream.aclose()

    async def _more(self) -> None:
        try:
            with anyio.fail_after(self._quiet):
                data = await self._stream.receive()
        except TimeoutError as error:
            raise UnreachableError(f"the server was silent for {self._quiet:g} s") from error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, ssl.SSLError) as error:
            what = str(error.__cause__ or error) or "broken off"
            raise UnreachableError(f"the connection ended: {what}") from error
        self._answer.feed(data)
