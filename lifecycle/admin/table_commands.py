"""Commands for tables: ``db``, ``db/show``, ``db/get``, ``db/watch``, ``db/cmp`` and others.

Source: the script commands of cilium/statedb; names and flags are the same.
"""

import heapq
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from lifecycle.admin.browse import Follower, TableRow, rows, tables_info
from lifecycle.admin.columns import Columns, TableView, aligned, columns_of, fitted, left_out_note
from lifecycle.admin.history import TableHistory
from lifecycle.admin.plain import plain, text
from lifecycle.admin.script import Arguments, Command, CommandError, Commands, Flag, State
from lifecycle.admin.trace import trace_lines
from lifecycle.jobs import TimeSlice
from lifecycle.tables import ReadTable, Snapshot, Table, Tables

__all__ = ["TableCommands"]

_OUT = Flag("out", "File to write to instead", short="o")
_COLUMNS = Flag("columns", "Columns to show, with commas between")
_FORMAT = Flag("format", "table, yaml or json", default="table", short="f", choices=("table", "yaml", "json"))
_INDEX = Flag("index", "The index to search, instead of the key", short="i")
_TIMEOUT = Flag("timeout", "How long to wait", "time", "5s")
_AT = Flag("at", "The moment to show, by its number or age: db/moments")
_SHOWN = (_OUT, _COLUMNS, _FORMAT, _AT)

Item = tuple[Hashable, Any, int]
"""A row of a snapshot: key, row, revision."""

_PART = 256
"""Number of rows that are sorted in one step."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
"""Seconds between two looks at a table."""


class TableCommands(Commands):
    """Commands over the tables of one hive."""

    def __init__(self, tables: Tables, history: TableHistory) -> None:
        self._tables = tables
        self._history = history
        named = partial(Command, complete=self._complete)
        super().__init__(
            Command("db", "List the tables", self._list),
            Command("db/moments", "List the moments that --at can show", self._list_moments),
            named("db/trace", "Show all moments as lines that a test can replay", self._trace, "[table...]"),
            named("db/show", "Show the rows of a table", self._show, "table", _SHOWN),
            named("db/get", "Show the row with a key", self._get, "table key", (*_SHOWN, _INDEX)),
            named(
                "db/list",
                "Show the rows with a key, or a value of an index",
                self._by_value,
                "table key",
                (*_SHOWN, _INDEX),
            ),
            named(
                "db/prefix",
                "Show the rows with a key, or value of an index, that begins so",
                self._by_prefix,
                "table key",
                (*_SHOWN, _INDEX),
            ),
            named(
                "db/lowerbound",
                "Show the rows from a key, or value of an index, on",
                self._from,
                "table key",
                (*_SHOWN, _INDEX),
            ),
            named("db/watch", "Show every row, then what changes", self._watch, "table", endless=True),
            named(
                "db/initialized",
                "Wait until tables are initialized",
                self._initialized,
                "[table...]",
                (_TIMEOUT,),
            ),
            named("db/empty", "Check that tables are empty", self._empty, "table..."),
            named(
                "db/cmp",
                "Compare a table with a file",
                self._cmp,
                "table file",
                (_TIMEOUT, Flag("grep", "Compare only rows that match")),
                help="The file looks as db/show prints, with the columns that count.\n"
                "A table that differs is looked at again until the time is over.",
            ),
        )

    async def _list(self, state: State, _arguments: Arguments) -> None:
        records = [
            {
                "name": info.name,
                "rows": str(info.rows),
                "revision": str(info.revision),
                "state": "complete" if info.initialized else f"waits for {', '.join(info.waits_for)}",
            }
            for info in tables_info(self._tables)
        ]
        await state.print(fitted(records, ["name", "rows", "revision", "state"], state.width, keep=["name"]))

    async def _list_moments(self, state: State, _arguments: Arguments) -> None:
        now = time.time()
        records = [
            {
                "moment": str(moment.number),
                "age": f"{now - moment.at:.0f}s",
                "changed": ", ".join(moment.changed),
            }
            for moment in self._history.all()
        ]
        columns = ["moment", "age", "changed"]
        await state.print(fitted(records, columns, state.width, below="changed"))

    async def _trace(self, state: State, arguments: Arguments) -> None:
        for name in arguments.words:
            if not isinstance(self._table(name), Table):
                raise CommandError(f"table {name} follows from others: trace those")
        async with aclosing(trace_lines(self._history, self._tables, arguments.words)) as lines:
            async for line in lines:
                await state.print(line)

    async def _show(self, state: State, arguments: Arguments) -> None:
        await _print(state, arguments, await _sorted(self._seen(arguments)))

    async def _get(self, state: State, arguments: Arguments) -> None:
        items = await self._matching(arguments, lambda value, expected: text(value) == expected)
        if not items:
            raise CommandError(f"table {arguments.words[0]} has no row with the key {arguments.words[1]}")
        await _print(state, arguments, items[:1])

    async def _by_value(self, state: State, arguments: Arguments) -> None:
        await _print(
            state, arguments, await self._matching(arguments, lambda value, expected: text(value) == expected)
        )

    async def _by_prefix(self, state: State, arguments: Arguments) -> None:
        items = await self._matching(arguments, lambda value, expected: text(value).startswith(expected))
        await _print(state, arguments, items)

    async def _from(self, state: State, arguments: Arguments) -> None:
        await _print(state, arguments, await self._matching(arguments, _at_least))

    async def _watch(self, state: State, arguments: Arguments) -> None:
        follower = Follower()
        async for batch in follower.follow(self._table(arguments.words[0])):
            for change in batch:
                record = _record(TableRow(change.rev, change.key, change.obj))
                sign = "-" if change.deleted else "+"
                shown = (
                    ""
                    if change.deleted
                    else "".join(f"  {name}={value}" for name, value in record.items() if value)
                )
                await state.print(f"{sign} {text(change.key)}{shown}")

    async def _initialized(self, state: State, arguments: Arguments) -> None:
        tables = [self._table(name) for name in arguments.words] or self._tables.all()

        async def waiting() -> list[str]:
            return [
                f"{table.name} waits for {', '.join(table.uninitialized_by)}"
                for table in tables
                if not table.initialized
            ]

        await _until_empty(state, arguments, waiting)

    async def _empty(self, _state: State, arguments: Arguments) -> None:
        for name in arguments.words:
            if count := len(self._table(name)):
                raise CommandError(f"table {name} has {count} rows, expected none")

    async def _cmp(self, state: State, arguments: Arguments) -> None:
        name, file = arguments.words
        table = self._table(name)
        try:
            golden = TableView.read(state.text_of(file))
            pattern = re.compile(arguments.flags["grep"])
        except (ValueError, re.error) as error:
            raise CommandError(f"{file}: {error}") from None

        async def records() -> list[dict[str, str]]:
            unfiltered = await _records(await _sorted(table.snapshot()))
            return [record for record in unfiltered if pattern.search("  ".join(record.values()))]

        async def differences() -> list[str]:
            present = await records()
            available = columns_of(present)
            if present and (unknown := [column for column in golden.columns if column not in available]):
                raise CommandError(
                    f"{file}: table {name} has no column {unknown[0]}; it has: {', '.join(available)}"
                )
            return golden.differences(present)

        try:
            await _until_empty(state, arguments, differences, f"table {name} is not as in {file}:")
        except CommandError:
            if not state.updates:
                raise
            state.goldens[file] = aligned(await records(), golden.columns)

    def _table(self, name: str) -> ReadTable[Any, Any]:
        try:
            return self._tables.get(name)
        except LookupError as error:
            raise CommandError(str(error)) from None

    def _seen(self, arguments: Arguments) -> Snapshot[Any, Any]:
        """Return the table of the first word as it is, or was at the moment of ``--at``.

        Raises CommandError.
        """
        name, moment = arguments.words[0], arguments.flags["at"]
        if not moment:
            return self._table(name).snapshot()
        snapshot = self._history.at(moment).seen.get(name)
        if snapshot is None:
            raise CommandError(f"--at={moment}: there was no table named {name}")
        if isinstance(snapshot, str):
            raise CommandError(f"--at={moment}: table {name} could not be read: {snapshot}")
        return snapshot

    async def _matching(self, arguments: Arguments, fits: Callable[[object, str], bool]) -> list[Item]:
        """Return the rows that match the second word by key, or by their value of an index.

        In order of keys.
        """
        name, expected = arguments.words
        snapshot, time_slice = self._seen(arguments), TimeSlice()
        searched = snapshot if arguments.flags["at"] else self._table(name)
        keys: dict[Hashable, None] = {}
        if index := arguments.flags["index"]:
            try:
                values = searched.by(index)
            except LookupError as error:
                raise CommandError(str(error)) from None
            for value in values.values():
                await time_slice.pause()
                if fits(plain(value), expected):
                    keys |= dict.fromkeys(values.keys(value))
        else:
            for key in snapshot.keys():  # noqa: SIM118  # iterating gives whole rows
                await time_slice.pause()
                if fits(plain(key), expected):
                    keys[key] = None
        return await _sorted(item for key in keys if (item := snapshot.item(key)) is not None)

    def _complete(self, before: Sequence[str], _beginning: str) -> Iterable[str]:
        return [] if before else [table.name for table in self._tables.all()]


async def _print(state: State, arguments: Arguments, items: Sequence[Item]) -> None:
    form, columns = arguments.flags["format"], arguments.parts("columns")
    if columns and form != "table":
        raise CommandError("--columns is for the format table")
    out: list[str] | None = [] if arguments.flags["out"] else None
    width = state.width if out is None else None
    shown = _table(items, columns, width) if form == "table" else _documents(items, form)
    async with aclosing(shown) as parts:
        async for part in parts:
            if out is None:
                await state.print(part)
            else:
                out.append(part)
    if out is not None:
        state.path(arguments.flags["out"]).write_text("".join(out), encoding="utf-8")


async def _documents(items: Sequence[Item], form: str) -> AsyncGenerator[str, None]:
    """Yield the rows as JSON or YAML, in slices."""
    first = True
    async with aclosing(rows(items)) as slices:
        async for part in slices:
            if form == "json":
                yield "".join(
                    f"{msgspec.json.format(msgspec.json.encode(row.obj), indent=2).decode()}\n"
                    for row in part
                )
            else:
                text = "---\n".join(msgspec.yaml.encode(row.obj).decode() for row in part)
                yield text if first else f"---\n{text}"
            first = False


async def _table(
    items: Sequence[Item], columns: Sequence[str], width: int | None
) -> AsyncGenerator[str, None]:
    """Yield the rows under the names of their fields, in slices; requested columns are never left out."""
    records, time_slice = await _records(items), TimeSlice()
    available: dict[str, None] = {}
    for record in records:
        available |= dict.fromkeys(record)
        await time_slice.pause()
    selected = [column.lower() for column in columns] or list(available)
    if records and (unknown := [column for column in selected if column not in available]):
        raise CommandError(f"there is no column {unknown[0]}; there are: {', '.join(available)}")
    if not selected:
        return
    table = Columns(selected)
    for record in records:
        table.measure(record)
        await time_slice.pause()
    left_out = table.fit(width, selected if columns else ()) if width is not None else []
    lines = [table.header()]
    for record in records:
        lines.append(table.line(record))
        if time_slice.over:
            yield "".join(lines)
            lines = []
            await time_slice.pause()
    if width is not None:
        lines += left_out_note(left_out, "--columns or --format=yaml shows them", width)
    if lines:
        yield "".join(lines)


async def _records(items: Iterable[Item]) -> list[dict[str, str]]:
    async with aclosing(rows(items)) as slices:
        return [_record(row) async for part in slices for row in part]


async def _until_empty(
    state: State,
    arguments: Arguments,
    look: Callable[[], Awaitable[list[str]]],
    beginning: str = "this did not change in time:",
) -> None:
    """Repeat until the result is empty. Raises CommandError with the rest after the timeout."""
    until, pause = state.now() + arguments.seconds("timeout"), _FIRST_PAUSE
    while remaining := await look():
        if state.now() >= until:
            raise CommandError("\n".join((beginning, *remaining)))
        await state.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


async def _sorted(unsorted: Iterable[Item]) -> list[Item]:
    """Sort by key, for one order everywhere; by text if keys cannot be compared.

    Parts are sorted and then merged, with pauses, so that the event loop is not blocked.
    """
    time_slice = TimeSlice()
    items: list[tuple[object, Item]] = []
    for item in unsorted:
        items.append((plain(item[0]), item))
        await time_slice.pause()
    order: Callable[[tuple[object, Item]], Any]
    for order in (lambda entry: entry[0], lambda entry: text(entry[0])):
        parts = [items[begin : begin + _PART] for begin in range(0, len(items), _PART)]
        merged: list[Item] = []
        try:
            for part in parts:
                part.sort(key=order)
                await time_slice.pause()
            for _, item in heapq.merge(*parts, key=order):
                merged.append(item)
                await time_slice.pause()
        except TypeError:
            continue
        return merged
    raise AssertionError("texts can be compared")


def _record(row: TableRow) -> dict[str, str]:
    """Return the fields of a row by name, with its key if that is not a field."""
    if not isinstance(row.obj, dict):
        return {"key": text(row.key), "value": text(row.obj)}
    fields = {str(name).lower(): text(value) for name, value in row.obj.items()}
    shown = any(type(value) is type(row.key) and value == row.key for value in row.obj.values())
    return fields if shown else {"key": text(row.key), **fields}


def _at_least(value: object, minimum: str) -> bool:
    if isinstance(value, int | float):
        try:
            return value >= float(minimum)
        except ValueError:
            raise CommandError(f"{minimum}: expected a number") from None
    return text(value) >= minimum
