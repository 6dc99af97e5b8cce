"""A value that becomes available during the start."""

from typing import Generic, TypeVar

import anyio

__all__ = ["Promise"]

T = TypeVar("T")


class Promise(Generic[T]):
    """Resolved or failed once; all waiters receive the value or the error.

    It is not awaitable itself, because a container that finds an awaitable awaits it.
    """

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._event: anyio.Event | None = None

    @property
    def resolved(self) -> bool:
        """Whether the value is available."""
        return bool(self._value)

    def resolve(self, value: T) -> None:
        """Set the value. Raises RuntimeError if the promise was resolved or failed before."""
        self._settle()
        self._value.append(value)

    def fail(self, error: BaseException) -> None:
        """Make every wait() raise `error`.

        Raises RuntimeError if the promise was resolved or failed before.
        """
        self._settle()
        self._error = error

    async def wait(self) -> T:
        """Wait for the value. Raises the error of fail()."""
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
