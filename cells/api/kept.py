"""What was made of each of some values, kept for the next answer that shows the same values.

Needs: nothing.   Gives: Kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Source = TypeVar("Source")
Made = TypeVar("Made")


class Kept(Generic[Source, Made]):
    """Makes something of values that are replaced, not changed, when they change: once of each object."""

    def __init__(self, make: Callable[[Source], Made]) -> None:
        self._make = make
        self._last: dict[int, tuple[Source, Made]] = {}
        """By the value's id, which is no other's while the value is held here."""

    def of(self, sources: Iterable[Source]) -> list[Made]:
        """What is made of each, in their order. What is not among them this time is forgotten."""
        last, self._last = self._last, {}
        for source in sources:
            found = last.get(id(source))
            self._last[id(source)] = (source, self._make(source)) if found is None else found
        return [made for _, made in self._last.values()]
