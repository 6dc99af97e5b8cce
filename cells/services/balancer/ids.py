"""Numbers of frontends and backends: never the same again before all others have been used.

A number that comes back soon would be taken for the old one by connections that remember it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Name = TypeVar("Name")


class IdsExhaustedError(Exception):
    """Every number is in use."""


class IdAllocator(Generic[Name]):
    """Numbers from ``first`` to ``last``; each the next free one after the last that was given, wrapping."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._next = first
        self._names: dict[int, Name] = {}

    def __len__(self) -> int:
        return len(self._names)

    def allocate(self, name: Name) -> int:
        """A number for a name. Raises IdsExhaustedError."""
        if len(self._names) > self._last - self._first:
            raise IdsExhaustedError(f"all {self._last - self._first + 1} numbers are in use")
        number = self._next
        while number in self._names:
            number = self._after(number)
        self._names[number] = name
        self._next = self._after(number)
        return number

    def allocate_all(self, names: Sequence[Name]) -> Sequence[int]:
        """A number for each, in this order, or for none. Raises IdsExhaustedError."""
        numbers = range(self._next, self._next + len(names))
        if numbers.stop <= self._last and self._names.keys().isdisjoint(numbers):
            self._names.update(zip(numbers, names, strict=True))
            self._next = numbers.stop
            return numbers
        if len(self._names) + len(names) > self._last - self._first + 1:
            raise IdsExhaustedError(f"all {self._last - self._first + 1} numbers are in use")
        return [self.allocate(name) for name in names]

    def restore(self, number: int, name: Name) -> bool:
        """Take a number that was given before; False when another name has it. The next comes after it."""
        if self._names.setdefault(number, name) != name:
            return False
        if number >= self._next:
            self._next = self._after(number)
        return True

    def release(self, number: int) -> None:
        """Give a number back; nothing happens for a free one."""
        self._names.pop(number, None)

    def _after(self, number: int) -> int:
        return self._first if number >= self._last else number + 1
