"""Declarations of indexes."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from lifecycle.tables.indexes.hashed import Index, RowSource, Values

if TYPE_CHECKING:
    from lifecycle.tables.indexes.lpm import Prefixes

__all__ = ["LPM", "IndexSpec", "Sorted", "index_of"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class Sorted(Generic[Row]):
    """An index ordered by its values, for ranges and prefixes: ``Sorted(lambda pod: [pod.name])``."""

    __slots__ = ("values",)

    def __init__(self, values: Values[Row]) -> None:
        self.values = values


class LPM(Generic[Row]):
    """An index by IP prefix, for longest prefix matches: ``LPM(lambda node: node.pod_cidrs)``.

    The function returns networks and addresses of the module ipaddress.
    """

    __slots__ = ("prefixes",)

    def __init__(self, prefixes: "Prefixes[Row]") -> None:
        self.prefixes = prefixes


IndexSpec = Values[Row] | Sorted[Row] | LPM[Row]
"""A function from a row to its values for a hash index, or the declaration of another kind."""


def index_of(source: RowSource[Key, Row], name: str, spec: IndexSpec[Row]) -> Index[Key, Row]:
    """Create the declared index, empty."""
    if isinstance(spec, Sorted):
        from lifecycle.tables.indexes.ordered import SortedIndex  # imported only by tables with such an index

        return SortedIndex(source, name, spec.values)
    if isinstance(spec, LPM):
        from lifecycle.tables.indexes.lpm import LPMIndex

        return LPMIndex(source, name, spec.prefixes)
    return Index(source, name, spec)
