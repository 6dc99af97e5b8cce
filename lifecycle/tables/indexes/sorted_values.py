"""Distinct values in sorted order.

A list of short lists: adding or removing one among 100,000 values moves some hundred, not all.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

__all__ = ["SortedValues"]

LONGEST = 1024
"""Maximum length of a short list; a longer one is split."""


class SortedValues:
    """A sorted set; adding, removing and searching take one or two microseconds."""

    __slots__ = ("_lasts", "_lists")

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []  # lists are not empty
        self._lasts: list[Any] = []  # the maximum of each list

    def add(self, value: Any) -> None:
        """Insert a new value. Raises TypeError if it cannot be compared with the others."""
        lists, lasts = self._lists, self._lasts
        if not lists:
            lists.append([value])
            lasts.append(value)
            return
        index = min(bisect_left(lasts, value), len(lists) - 1)
        part = lists[index]
        insort(part, value)
        lasts[index] = part[-1]
        if len(part) > LONGEST:
            half = len(part) // 2
            lists.insert(index + 1, part[half:])
            del part[half:]
            lasts[index : index + 1] = [part[-1], lasts[index]]

    def remove(self, value: Any) -> None:
        """Remove an existing value."""
        index = bisect_left(self._lasts, value)
        part = self._lists[index]
        del part[bisect_left(part, value)]
        if part:
            self._lasts[index] = part[-1]
        else:
            del self._lists[index], self._lasts[index]

    def starting_at(self, value: Any) -> Iterator[Any]:
        """Yield the values from this one on, which need not exist."""
        index = bisect_left(self._lasts, value)
        if index < len(self._lists):
            part = self._lists[index]
            yield from part[bisect_left(part, value) :]
            for following in self._lists[index + 1 :]:
                yield from following

    def __iter__(self) -> Iterator[Any]:
        for part in self._lists:
            yield from part
