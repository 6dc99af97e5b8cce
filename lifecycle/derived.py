"""A table that follows from others.

Needs:  the tables it follows from, a pure function.
Gives:  Derived.

It is worked out when someone reads it, not when a source is written: a burst of writes costs one run of the
function, and an error in it reaches who reads, never who writes.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from lifecycle.index import Values
from lifecycle.table import ReadTable

__all__ = ["Derived"]

Row = TypeVar("Row")


class Derived(ReadTable[Row]):
    """Equals ``fn(rows of the first source, rows of the second, ...)``, a mapping from key to row.

    Nobody writes it. What reading raises is what the function raised; it is run again at the next reading.
    It is initialized when all its sources are.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Mapping[Any, Row]],
        *sources: ReadTable[Any],
        indexes: Mapping[str, Values[Row]] | None = None,
    ) -> None:
        super().__init__(name, indexes)
        self._fn = fn
        self._sources = sources
        self._stale = True
        for source in sources:
            source._listen(self)  # noqa: SLF001  # tables are one mechanism

    @property
    def uninitialized_by(self) -> list[str]:
        """Who is still to be waited for."""
        return [name for source in self._sources for name in source.uninitialized_by]

    async def wait_initialized(self) -> None:
        """Wait until every source is initialized."""
        for source in self._sources:
            await source.wait_initialized()

    def tell(self, changed: Mapping[Hashable, Any], revision: int) -> None:
        """A source has changed."""
        del changed, revision
        self.wake()

    def wake(self) -> None:
        """A source may have changed: whoever watches this one has to look."""
        if not self._stale:
            self._stale = True
            for listener in self._listening():
                listener.wake()

    def _refresh(self) -> None:
        wanted = self._fn(*(source.all() for source in self._sources))
        writes: dict[Hashable, Row | None] = dict.fromkeys(key for key in self._rows if key not in wanted)
        writes.update(wanted)
        self._stale = False
        try:
            self._commit(writes)
        except BaseException:
            self._stale = True
            raise
