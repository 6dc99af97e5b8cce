"""Records as columns of text, and comparison of such text with records.

Source: cilium/statedb's script commands: a column begins below the word of the header.
"""

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

__all__ = ["Columns", "TableView", "aligned", "columns_of", "fitted", "left_out_note", "wrapped"]

_GAP = "   "
_LEAST = 10
"""Number of characters that a shortened cell keeps."""
_BELOW = "    "


def columns_of(records: Iterable[Mapping[str, str]]) -> list[str]:
    """Return all names that occur, in order."""
    return list(dict.fromkeys(name for record in records for name in record))


class Columns:
    """Records as lines, each column as wide as its widest cell: measure() all of them first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._widths = [len(name) for name in names]
        self._filled: set[str] = set()

    def measure(self, record: Mapping[str, str]) -> None:
        """Widen columns for the cells of a record."""
        cells = [record.get(name, "") for name in self._names]
        self._filled.update(name for name, cell in zip(self._names, cells, strict=True) if cell)
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]

    def fit(self, width: int, keep: Collection[str]) -> list[str]:
        """Fit lines into this width: first without empty and the widest columns, then with shorter cells.

        Columns to keep, or without any the first one, remain. Returns the names of omitted columns that are
        not empty.
        """
        keep = keep or self._names[:1]
        widths = dict(zip(self._names, self._widths, strict=True))
        others = sorted(
            (name for name in self._names if name not in keep),
            key=lambda name: (name not in self._filled, widths[name]),
        )
        left_out = []
        while self._excess(width) > 0 and others:
            name = others.pop()
            if name in self._filled:
                left_out.append(name)
            self._names = [column for column in self._names if column != name]
            self._widths = [widths[column] for column in self._names]
        while (excess := self._excess(width)) > 0 and max(self._widths) > _LEAST:
            ordered = sorted(self._widths)
            second = ordered[-2] if len(ordered) > 1 else 0
            self._widths[self._widths.index(ordered[-1])] = max(
                ordered[-1] - excess, min(second, ordered[-1] - 1), _LEAST
            )
        return left_out

    def _excess(self, width: int) -> int:
        return sum(self._widths) + len(_GAP) * (len(self._widths) - 1) - width

    def header(self) -> str:
        """Return the header in upper case."""
        return self._line([name.upper() for name in self._names])

    def line(self, record: Mapping[str, str]) -> str:
        """Return the cells of a record."""
        return self._line([record.get(name, "") for name in self._names])

    def _line(self, cells: Sequence[str]) -> str:
        return f"{_line(cells, self._widths)}\n"


def fitted(
    records: Sequence[Mapping[str, str]],
    columns: Sequence[str],
    width: int | None,
    *,
    keep: Collection[str] = (),
    below: str = "",
) -> str:
    """As aligned(), in lines of this width, if given.

    The column named ``below`` then follows each line; columns that do not fit are left out and named at the
    end.
    """
    whole = aligned(records, columns)
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    table = Columns([name for name in columns if name != below])
    for record in records:
        table.measure(record)
    left_out = table.fit(width, keep)
    lines = [table.header()]
    for record in records:
        lines += [table.line(record), *wrapped(record.get(below, ""), width, _BELOW)]
    return "".join([*lines, *left_out_note(left_out, "a wider terminal shows them", width)])


def left_out_note(names: Sequence[str], more: str, width: int) -> list[str]:
    """Lines that name the columns left out, and how to show them; empty if none is."""
    return list(wrapped(f"not shown: {', '.join(names)} ({more})", width)) if names else []


def wrapped(text: str, width: int | None, indent: str = "", further: str = "") -> Iterator[str]:
    """Yield a text in lines of this width, if given, each after ``indent``."""
    if width is None:
        yield f"{indent}{text}\n"
        return
    for line in textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + further, break_on_hyphens=False
    ):
        yield f"{line}\n"


def aligned(records: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    """Return a header in upper case and a line for each record; each column as wide as its widest cell."""
    table = Columns(columns)
    for record in records:
        table.measure(record)
    return "".join([table.header(), *map(table.line, records)])


class TableView(msgspec.Struct, frozen=True):
    """A user-defined view of a table: some of its columns, all of its rows."""

    columns: tuple[str, ...]
    starts: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, page: str) -> "TableView":
        """Parse a view. Empty lines and lines that begin with # are ignored.

        Raises ValueError without a header.
        """
        lines = [line for line in page.expandtabs().splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            raise ValueError("expected a line with the names of columns")
        words = list(re.finditer(r"\S+", lines[0]))
        starts = tuple(word.start() for word in words)
        rows = tuple(_cut(line, starts) for line in lines[1:])
        return cls(tuple(word[0].lower() for word in words), starts, rows)

    def differences(self, records: Sequence[Mapping[str, str]]) -> list[str]:
        """Lines with ``-`` for expected and ``+`` for present records; empty if they are equal."""
        rows = [tuple(record.get(name, "") for name in self.columns) for record in records]
        if rows == list(self.rows):
            return []
        import difflib  # imported only for errors

        every = [[name.upper() for name in self.columns], *self.rows, *rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        before, now = ([_line(row, widths) for row in side] for side in (self.rows, rows))
        lines = [line for line in difflib.ndiff(before, now) if not line.startswith("?")]
        return [f"  {_line(every[0], widths)}", *lines]


def _cut(line: str, starts: Sequence[int]) -> tuple[str, ...]:
    ends = [*starts[1:], None]
    return tuple(line[start:end].strip() for start, end in zip(starts, ends, strict=True))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(
        _short(cell, width).ljust(width) for cell, width in zip(cells, widths, strict=True)
    ).rstrip()


def _short(text: str, most: int) -> str:
    """Shorten a text to a maximum length by its middle, as names differ at their ends."""
    if len(text) <= most:
        return text
    start = most // 2
    return f"{text[:start]}…{text[len(text) - (most - start - 1) :]}"
