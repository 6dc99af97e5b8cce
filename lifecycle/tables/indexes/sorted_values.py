"""Distinct values in their order.

A list of short lists: adding or removing one among 100,000 moves some hundred, not all.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

__all__ = ["SortedValues"]

LONGEST = 1024
"""Of a short list; a longer one is split."""


class SortedValues:
    """Adding, removing and finding a place take a microsecond or two."""

    __slots__ = ("_lasts", "_lists")

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []  # none is empty
        self._lasts: list[Any] = []  # the greatest of each

    def add(self, value: Any) -> None:
        """Put a new value in its place. Raises TypeError when it cannot be compared with those there."""
        lists, lasts = self._lists, self._lasts
        if not lists:
            lists.append([value])
            lasts.append(value)
            return
        at = min(bisect_left(lasts, value), len(lists) - 1)
        found = lists[at]
        insort(found, value)
        lasts[at] = found[-1]
        if len(found) > LONGEST:
            half = len(found) // 2
            lists.insert(at + 1, found[half:])
            del found[half:]
            lasts[at : at + 1] = [found[-1], lasts[at]]

    def remove(self, value: Any) -> None:
        """Take out a value that is there."""
        at = bisect_left(self._lasts, value)
        found = self._lists[at]
        del found[bisect_left(found, value)]
        if found:
            self._lasts[at] = found[-1]
        else:
            del self._lists[at], self._lasts[at]

    def starting_at(self, value: Any) -> Iterator[Any]:
        """The values from this one on, whether it is there or not."""
        at = bisect_left(self._lasts, value)
        if at < len(self._lists):
            found = self._lists[at]
            yield from found[bisect_left(found, value) :]
            for following in self._lists[at + 1 :]:
                yield from following

    def __iter__(self) -> Iterator[Any]:
        for found in self._lists:
            yield from found
