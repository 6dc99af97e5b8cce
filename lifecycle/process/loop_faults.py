"""What callbacks of the event loop raise: it is logged, and health shows it.

Why:    nothing awaits a callback, so asyncio only prints what it raises, and whatever waits for its work
        waits for ever.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from lifecycle.process.health import HealthTree
from lifecycle.process.logs import Logger

__all__ = ["LoopFaults"]


class LoopFaults:
    """The exception handler of a loop while a hive runs on it; the handler before is called as well."""

    def __init__(self, health: HealthTree, name: str, log: Logger) -> None:
        """``name``: the hive's; the health entry ``<name>.event-loop`` appears with the first fault."""
        self._health = health
        self._module = f"{name}.event-loop"
        self._log = log
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Any = None

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the loop's faults, unless a hive around this one, with the same health, does."""
        before = loop.get_exception_handler()
        around = getattr(before, "__self__", None)
        if isinstance(around, LoopFaults) and around._health is self._health:  # noqa: SLF001  # of this class
            return
        self._loop, self._before = loop, before
        loop.set_exception_handler(self._handle)

    def remove(self) -> None:
        """Leave the loop's faults to the handler before."""
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
        what = str(context.get("message") or "a fault without a message")
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self._log.error("fault in the event loop", what=what, exc_info=error)
        earlier = f", and {self._count - 1} before" if self._count > 1 else ""
        self._health.report(self._module, "degraded", f"at {when}: {what}{earlier}", error)
