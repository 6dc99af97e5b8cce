"""Commands that write tables, for scripts only: in a running hive, a table has one writer already."""

import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from lifecycle.admin.plain import plain, text
from lifecycle.admin.script import Arguments, Command, CommandError, Commands, State
from lifecycle.hive.hive import Hive
from lifecycle.settings import values
from lifecycle.tables import Table

__all__ = ["decoded", "row_type", "writable", "write_commands"]


def write_commands(hive: Hive) -> Commands:
    """Commands over the tables of this hive."""

    async def insert(state: State, arguments: Arguments) -> None:
        name, *files = arguments.words
        table = writable(hive, name)
        rows = [row for file in files for row in _rows(state.text_of(file), file, row_type(hive, table))]
        with table.txn() as txn:
            for row in rows:
                txn.put(row)

    async def delete(_state: State, arguments: Arguments) -> None:
        name, *keys = arguments.words
        table = writable(hive, name)
        by_text = {text(plain(key)): key for key, _, _ in table.snapshot().items()}
        if missing := [key for key in keys if key not in by_text]:
            raise CommandError(f"table {name} has no row with the key {missing[0]}")
        with table.txn() as txn:
            for key in keys:
                txn.delete(by_text[key])

    def complete(before: Sequence[str], _beginning: str) -> Iterable[str]:
        return [] if before else [table.name for table in hive.tables.all() if isinstance(table, Table)]

    return Commands(
        Command(
            "db/insert",
            "Put rows into a table",
            insert,
            "table file...",
            complete=complete,
            help="The files are YAML: a row, a list of rows, or several documents.",
        ),
        Command("db/delete", "Delete rows of a table", delete, "table key...", complete=complete),
    )


def writable(hive: Hive, name: str) -> Table[Any, Any]:
    """Return the table of this name. Raises CommandError if there is none or it is derived."""
    try:
        table = hive.tables.get(name)
    except LookupError as error:
        raise CommandError(str(error)) from None
    if not isinstance(table, Table):
        raise CommandError(f"table {name} follows from others: expected one that can be written")
    return table


def row_type(hive: Hive, table: Table[Any, Any]) -> object:
    """Return the type of the rows, from the hint of the table's constructor.

    Raises CommandError without one.
    """
    args = typing.get_args(hive.key_of(table))
    if not args:
        raise CommandError(
            f"table {table.name}: the type of its rows is not known; have a constructor give Table[Key, Row]"
        )
    return args[-1]


def _rows(page: str, file: str, kind: object) -> Iterator[object]:
    import yaml  # imported only by scripts with rows

    try:
        documents = list(yaml.safe_load_all(page))
    except yaml.YAMLError as error:
        raise CommandError(f"{file}: this is not YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        for row in document if isinstance(document, list) else [document]:
            try:
                yield decoded(row, kind)
            except ValueError as error:
                raise CommandError(f"{file}: {error}") from None


def decoded(row: object, kind: object) -> object:
    """Return a row of this type, from input of users or of db/trace. Raises ValueError, one line."""
    try:
        return msgspec.convert(_encoded(row, kind), kind, strict=False, dec_hook=_from_text)
    except TypeError as error:  # an ambiguous union in the type
        raise ValueError(str(error)) from error


def _encoded(row: object, kind: object) -> object:
    """With the names that msgspec expects, also for fields that a struct renames."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(row, dict)):
        return row
    names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    return {names.get(name, name): value for name, value in row.items()}


def _from_text(kind: type, value: object) -> object:
    """Types that msgspec does not know: those of settings, and types with a constructor from text."""
    if isinstance(value, kind):
        return value
    if values.known(kind):
        return values.accept(value, kind)
    make: Callable[[object], object] = getattr(kind, "parse", kind)
    return make(value)
