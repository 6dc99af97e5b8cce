"""Errors of callbacks of the event loop: logs them and shows them in health.

Why:    nothing awaits a callback, so asyncio only prints its error, and whatever waits for its work waits
        forever.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from lifecycle.process.health import HealthTree
from lifecycle.process.logs import Logger

__all__ = ["LoopFaults"]


class LoopFaults:
    """The exception handler of a loop while a hive runs on it; also calls the previous handler."""

    def __init__(self, health: HealthTree, name: str, log: Logger) -> None:
        """``name``: that of the hive; the health entry ``<name>.event-loop`` appears with the first error."""
        self._health = health
        self._module = f"{name}.event-loop"
        self._log = log
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Any = None

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the loop's errors, unless an outer hive with the same health does."""
        before = loop.get_exception_handler()
        around = getattr(before, "__self__", None)
        if isinstance(around, LoopFaults) and around._health is self._health:  # noqa: SLF001  # of this class
            return
        self._loop, self._before = loop, before
        loop.set_exception_handler(self._handle)

    def remove(self) -> None:
        """Restore the previous handler."""
        loop, self._loop = self._loop, None
        if loop is not None and loop.get_exception_handler() == self._handle:
            loop.set_exception_handler(self._before)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._loop is not None:
            self._report(context)
        if self._before is not None:
            self._before(loop, context)

    def _report(self, context: dict[str, Any]) -> None:
        self._count += 1
        error = context.get("exception")
        message = str(context.get("message") or "a fault without a message")
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self._log.error("fault in the event loop", what=message, exc_info=error)
        earlier = f", and {self._count - 1} before" if self._count > 1 else ""
        self._health.report(self._module, "degraded", f"at {when}: {message}{earlier}", error)
