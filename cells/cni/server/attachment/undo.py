"""What has been done so far, and how to take it back.

Needs: Endpoints.   Gives: Undo, remove_endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cells.cni.server.attachment.edges import Endpoints
from cells.cni.server.protocol.errors import CniError
from cells.endpoint import Endpoint
from lifecycle import Logger


class Undo:
    """A stack of opposites. Taking back never stops half-way: each failure is logged, none skips the rest."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Awaitable[None] | None]]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def push(self, what: str, step: Callable[[], Awaitable[None] | None]) -> None:
        """Remember how to take ``what`` back."""
        self._steps.append((what, step))

    def forget(self) -> None:
        """All is well: nothing will be taken back."""
        self._steps.clear()

    async def roll_back(self, log: Logger) -> None:
        """Take everything back, last things first."""
        while self._steps:
            what, step = self._steps.pop()
            try:
                waiting = step()
                if waiting is not None:
                    await waiting
            except Exception as error:  # whatever it is, the steps below must still run
                log.exception("roll-back step failed", step=what, error=str(error))


def remove_endpoint(endpoints: Endpoints, endpoint: Endpoint) -> None:
    """Take back an endpoint whose addresses are not released with it; raises CniError for what stayed."""
    problems = endpoints.delete(endpoint, release_address=False)
    if problems:
        raise CniError("; ".join(problems))
