"""Hooks: what runs when the hive starts and stops.

Needs:  nothing.
Gives:  Hook, Lifecycle (injectable, bound to the constructor that asked for it), and for the supervisor the
        list of what each one registered.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import msgspec

__all__ = ["Hook", "HookSpec", "Lifecycle"]


class Hook(msgspec.Struct, frozen=True):
    """A start, a stop, or both. Each is awaited in one and the same task."""

    name: str
    start: Callable[[], Awaitable[object]] | None = None
    stop: Callable[[], Awaitable[object]] | None = None
    """Called only when start has returned."""
    start_timeout: float | None = None
    """Seconds (or a Duration); None is the hive's."""
    stop_timeout: float | None = None


class HookSpec(msgspec.Struct, frozen=True):
    """A hook as the supervisor sees it: a context to enter at start and leave at stop."""

    name: str
    context: Callable[[], AbstractAsyncContextManager[object]]
    start_timeout: float | None = None
    stop_timeout: float | None = None


class Lifecycle:
    """Registers hooks of the constructor (or invoked function) that asked for it.

    They start after all hooks of what that one depends on, in the order registered here; others that do not
    depend on each other start at the same time. They stop once the hooks of everything that depends on it
    have stopped.
    """

    __slots__ = ("_owner", "_sealed", "specs")

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._sealed = False
        self.specs: list[HookSpec] = []

    def append(self, hook: Hook) -> None:
        """Register a start and a stop."""
        self._add(HookSpec(hook.name, lambda: _Calls(hook), hook.start_timeout, hook.stop_timeout))

    def enter(
        self,
        name: str,
        context: Callable[[], AbstractAsyncContextManager[object]],
        *,
        start_timeout: float | None = None,
        stop_timeout: float | None = None,
    ) -> None:
        """Register an asynchronous context manager: entered at start, left at stop, in one task.

        So it may hold a task group. If one of its tasks crashes while the hive runs, the hive ends.
        """
        self._add(HookSpec(name, context, start_timeout, stop_timeout))

    def seal(self) -> None:
        """No more hooks: the hive starts."""
        self._sealed = True

    def _add(self, spec: HookSpec) -> None:
        if self._sealed:
            raise RuntimeError(
                f"hook {spec.name!r} of {self._owner}: hooks are registered while constructing only"
            )
        self.specs.append(spec)


class _Calls:
    """A Hook as a context manager; by hand, so that await stacks show the hook and not contextlib."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    async def __aenter__(self) -> None:
        if self._hook.start is not None:
            await self._hook.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook.stop is not None:
            await self._hook.stop()
