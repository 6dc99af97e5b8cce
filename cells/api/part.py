"""What a cell contributes to the REST API: operations that belong together.

Needs: nothing.   Gives: Route, Operation, ApiPart.
Any cell may provide a ``Member[ApiPart]``; the API serves the routes of all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from cells.api.wire import answer, empty
from lifecycle.http import Refusal, Request, Response

Operation = Callable[[Request], Awaitable[Response]]


class Route(msgspec.Struct, frozen=True):
    """One operation: where it is, and how a Refusal of it is answered."""

    method: str
    path: str
    operation: Operation
    texts: frozenset[int] = frozenset()
    """Error statuses whose body is the text."""
    bare: frozenset[int] = frozenset()
    """Error statuses without a body."""

    def refusal(self, error: Refusal) -> Response:
        """The answer to an error of the cell behind; one outside the schema becomes the nearest in it."""
        if error.status in self.texts:
            return answer(error.status, error.text)
        if error.status in self.bare:
            return empty(error.status)
        if error.status < 500 and 404 in self.bare:
            return empty(404)
        return answer(500, error.text)


def _nothing() -> None:
    """For parts without streams."""


class ApiPart(msgspec.Struct, frozen=True):
    """Operations that belong together, by a name that is theirs alone."""

    name: str
    routes: Sequence[Route]
    open: Callable[[], None] = _nothing
    """Called when the server starts, perhaps again."""
    close: Callable[[], None] = _nothing
    """Called when the server stops: ends what would go on for ever."""
