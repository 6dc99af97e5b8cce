"""Records as columns of text, and such text compared with records.

Source: cilium/statedb's script commands: where a word of the header stands, there its column begins.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

__all__ = ["Columns", "Golden", "aligned", "columns_of"]

_GAP = "   "


def columns_of(found: Iterable[Mapping[str, str]]) -> list[str]:
    """Every name that occurs, in order."""
    return list(dict.fromkeys(name for record in found for name in record))


class Columns:
    """Records as lines, each column as wide as its widest cell: measure() all of them first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._widths = [len(name) for name in names]

    def measure(self, record: Mapping[str, str]) -> None:
        """Make room for the cells of a record."""
        cells = (record.get(name, "") for name in self._names)
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]

    def header(self) -> str:
        """A line of names in upper case."""
        return self._line([name.upper() for name in self._names])

    def line(self, record: Mapping[str, str]) -> str:
        """The cells of a record."""
        return self._line([record.get(name, "") for name in self._names])

    def _line(self, cells: Sequence[str]) -> str:
        return f"{_line(cells, self._widths)}\n"


def aligned(found: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    """A line of names in upper case, and one for each record; each column as wide as its widest cell."""
    table = Columns(columns)
    for record in found:
        table.measure(record)
    return "".join([table.header(), *map(table.line, found)])


class Golden(msgspec.Struct, frozen=True):
    """A view of a table that a user defined: some of its columns, all of its rows."""

    columns: tuple[str, ...]
    starts: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, page: str) -> "Golden":
        """Empty lines and those that begin with # count for nothing. Raises ValueError without a header."""
        lines = [line for line in page.expandtabs().splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            raise ValueError("expected a line with the names of columns")
        words = list(re.finditer(r"\S+", lines[0]))
        starts = tuple(word.start() for word in words)
        rows = tuple(_cut(line, starts) for line in lines[1:])
        return cls(tuple(word[0].lower() for word in words), starts, rows)

    def differences(self, found: Sequence[Mapping[str, str]]) -> list[str]:
        """Lines with ``-`` for what was expected, ``+`` for what is there, all of it; none if equal."""
        rows = [tuple(record.get(name, "") for name in self.columns) for record in found]
        if rows == list(self.rows):
            return []
        import difflib  # only mistakes need it

        every = [[name.upper() for name in self.columns], *self.rows, *rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        before, now = ([_line(row, widths) for row in side] for side in (self.rows, rows))
        lines = [line for line in difflib.ndiff(before, now) if not line.startswith("?")]
        return [f"  {_line(every[0], widths)}", *lines]


def _cut(line: str, starts: Sequence[int]) -> tuple[str, ...]:
    ends = [*starts[1:], None]
    return tuple(line[start:end].strip() for start, end in zip(starts, ends, strict=True))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
