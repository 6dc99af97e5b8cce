"""Asking the hive to end.

Needs:  nothing.
Gives:  Shutdown, injectable.
"""

from collections.abc import Callable

__all__ = ["Shutdown"]


class Shutdown:
    """Ends the hive from inside. The first request counts; it is only an asking, so it returns at once."""

    def __init__(self) -> None:
        self.requested = False
        """Whether someone has asked."""
        self.error: BaseException | None = None
        """Why, when it was a fault."""
        self._listeners: list[Callable[[], None]] = []

    def request(self, error: BaseException | None = None) -> None:
        """Ask for an ordered stop. With an error the run ends with its exit code, else with 0."""
        if self.requested:
            return
        self.requested = True
        self.error = error
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when someone asks; at once when someone has."""
        if self.requested:
            listener()
        self._listeners.append(listener)
