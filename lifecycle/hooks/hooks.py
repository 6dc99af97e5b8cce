"""Hooks: what runs when the hive starts and stops."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import msgspec

from lifecycle.hints.places import Place, caller
from lifecycle.hooks.checks import awaitable, check_async, check_context, check_seconds

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
    source: object = None
    """The function that was registered, to report its file and line; None for the hive's own hooks."""


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
        """Register a start and a stop. Raises TypeError for one that is not async, and for odd time-outs."""
        place = caller()
        if not isinstance(hook, Hook) or not isinstance(hook.name, str):
            raise TypeError(f"hook of {self._owner} at {place}: {hook!r}: expected Hook(name, start, stop)")
        what = f"hook {hook.name!r} of {self._owner}"
        for name in ("start", "stop"):
            if (call := getattr(hook, name)) is not None:
                check_async(call, f"{name} of {what}", place)
        _check_timeouts(what, place, hook.start_timeout, hook.stop_timeout)
        source = hook.start or hook.stop
        self._add(HookSpec(hook.name, lambda: _Calls(hook), hook.start_timeout, hook.stop_timeout, source))

    def enter(
        self,
        name: str,
        context: Callable[[], AbstractAsyncContextManager[object]],
        *,
        start_timeout: float | None = None,
        stop_timeout: float | None = None,
    ) -> None:
        """Register an asynchronous context manager: entered at start, left at stop, in one task.

        So it may hold a task group. If one of its tasks crashes while the hive runs, the hive ends. Raises
        TypeError for what makes no such context manager, and for odd time-outs.
        """
        place, what = caller(), f"hook {name!r} of {self._owner}"
        check_context(context, what, place)
        _check_timeouts(what, place, start_timeout, stop_timeout)
        self._add(HookSpec(name, context, start_timeout, stop_timeout, context))

    def seal(self) -> None:
        """No more hooks: the hive starts."""
        self._sealed = True

    def _add(self, spec: HookSpec) -> None:
        if self._sealed:
            raise RuntimeError(
                f"hook {spec.name!r} of {self._owner}: hooks are registered while constructing only"
            )
        self.specs.append(spec)


def _check_timeouts(what: str, place: Place, start: float | None, stop: float | None) -> None:
    for name, value in (("start", start), ("stop", stop)):
        if value is not None:
            check_seconds(value, f"the {name} time-out of {what}", place)


class _Calls:
    """A Hook as a context manager. A class, so that await stacks show the hook and not contextlib."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    async def __aenter__(self) -> None:
        if self._hook.start is not None:
            await awaitable(self._hook.start(), self._hook.start, "start")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook.stop is not None:
            await awaitable(self._hook.stop(), self._hook.stop, "stop")
