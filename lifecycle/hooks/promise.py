"""A value that arrives later in the start-up."""

from typing import Generic, TypeVar

import anyio

__all__ = ["Promise"]

T = TypeVar("T")


class Promise(Generic[T]):
    """Resolved or failed once; all waiters get the value, or the failure.

    Not awaitable itself on purpose: a container that meets an awaitable tries to await it.
    """

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._event: anyio.Event | None = None

    @property
    def resolved(self) -> bool:
        """Whether the value is there."""
        return bool(self._value)

    def resolve(self, value: T) -> None:
        """Give the value. Raises RuntimeError when the promise was resolved or failed before."""
        self._settle()
        self._value.append(value)

    def fail(self, error: BaseException) -> None:
        """Give up: every wait() raises `error`. Raises RuntimeError when resolved or failed before."""
        self._settle()
        self._error = error

    async def wait(self) -> T:
        """The value, once it is there. Raises what fail() was given."""
        if not self._value and self._error is None:
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _settle(self) -> None:
        if self._value or self._error is not None:
            raise RuntimeError("this promise was resolved or failed before")
        if self._event is not None:
            self._event.set()
