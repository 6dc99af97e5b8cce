"""Hooks, and their registration by constructors."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import msgspec

from lifecycle.hints.places import Place, caller
from lifecycle.hooks.checks import awaitable, check_async, check_context, check_seconds

__all__ = ["Hook", "HookSpec", "Lifecycle"]


class Hook(msgspec.Struct, frozen=True):
    """A start function, a stop function, or both. One task awaits both."""

    name: str
    start: Callable[[], Awaitable[object]] | None = None
    stop: Callable[[], Awaitable[object]] | None = None
    """Called only if start has returned."""
    start_timeout: float | None = None
    """Seconds, or a Duration; None is the hive's timeout."""
    stop_timeout: float | None = None


class HookSpec(msgspec.Struct, frozen=True):
    """A hook as the supervisor sees it: a context that is entered at start and left at stop."""

    name: str
    context: Callable[[], AbstractAsyncContextManager[object]]
    start_timeout: float | None = None
    stop_timeout: float | None = None
    source: object = None
    """The registered function, to report its file and line; None for the hive's own hooks."""


class Lifecycle:
    """Registers hooks of the constructor, or invoked function, that receives it.

    They start in the order of registration, after all hooks of the dependencies of their owner; independent
    owners start in parallel. They stop after the hooks of everything that depends on their owner.
    """

    __slots__ = ("_owner", "_sealed", "specs")

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._sealed = False
        self.specs: list[HookSpec] = []

    def append(self, hook: Hook) -> None:
        """Register a start and a stop function.

        Raises TypeError if one is not async or a timeout is invalid.
        """
        place = caller()
        if not isinstance(hook, Hook) or not isinstance(hook.name, str):
            raise TypeError(f"hook of {self._owner} at {place}: {hook!r}: expected Hook(name, start, stop)")
        subject = f"hook {hook.name!r} of {self._owner}"
        for name in ("start", "stop"):
            if (call := getattr(hook, name)) is not None:
                check_async(call, f"{name} of {subject}", place)
        _check_timeouts(subject, place, hook.start_timeout, hook.stop_timeout)
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
        """Register an asynchronous context manager: one task enters it at start and leaves it at stop.

        So it may hold a task group: if one of its tasks fails while the hive runs, the hive ends. Raises
        TypeError if a call does not make such a context manager or a timeout is invalid.
        """
        place, subject = caller(), f"hook {name!r} of {self._owner}"
        check_context(context, subject, place)
        _check_timeouts(subject, place, start_timeout, stop_timeout)
        self._add(HookSpec(name, context, start_timeout, stop_timeout, context))

    def seal(self) -> None:
        """Refuse further hooks, as the hive starts."""
        self._sealed = True

    def _add(self, spec: HookSpec) -> None:
        if self._sealed:
            raise RuntimeError(
                f"hook {spec.name!r} of {self._owner}: hooks are registered while constructing only"
            )
        self.specs.append(spec)


def _check_timeouts(subject: str, place: Place, start: float | None, stop: float | None) -> None:
    for name, value in (("start", start), ("stop", stop)):
        if value is not None:
            check_seconds(value, f"the {name} time-out of {subject}", place)


class _Calls:
    """A Hook as a context manager. A class, so that await stacks show the hook, not contextlib."""

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
