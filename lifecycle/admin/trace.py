"""Traces: the contents of a running hive's tables, moment by moment, as lines that a test replays.

Why:    a fault that appears after hours in production is reproduced in a test with simulated time and any
        order of tasks: lifecycle.testing.Trace reads these lines. Derived tables follow from the others, so
        they are left out.
"""

from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any

import msgspec

from lifecycle.admin.history import TableHistory
from lifecycle.admin.plain import plain
from lifecycle.admin.script import CommandError
from lifecycle.jobs import TimeSlice
from lifecycle.tables import Snapshot, Table, Tables

__all__ = ["TraceLine", "trace_lines"]

ROWS = 256
"""Maximum number of rows in a line."""


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of one table. Lines of one moment have the same time."""

    at: float
    """In seconds since the epoch."""
    table: str
    put: Sequence[object] = ()
    """New and changed rows."""
    delete: Sequence[object] = ()
    """Keys of deleted rows, as the shell shows them."""


async def trace_lines(
    history: TableHistory, tables: Tables, names: Sequence[str]
) -> AsyncGenerator[str, None]:
    """Yield all moments, one JSON object a line: all rows of the first one, then changes.

    Of the tables in `names`, or of all writable tables. Raises CommandError.
    """
    chosen = list(names) or [table.name for table in tables.all() if isinstance(table, Table)]
    time_slice = TimeSlice()
    before: dict[str, Snapshot[Any, Any] | None] = dict.fromkeys(chosen)
    for moment in history.moments("db/trace"):
        for name in chosen:
            seen = moment.seen.get(name)
            if isinstance(seen, str):
                raise CommandError(f"table {name} could not be read at moment {moment.number}: {seen}")
            if seen is None:  # the table did not exist yet
                continue
            changed = list(_changed(before[name], seen))
            for begin in range(0, max(len(changed), 1 if before[name] is None else 0), ROWS):
                yield _line(moment.at, name, seen, changed[begin : begin + ROWS])
                await time_slice.pause()
            before[name] = seen


def _changed(before: Snapshot[Any, Any] | None, now: Snapshot[Any, Any]) -> Sequence[Hashable]:
    return list(now.keys()) if before is None else now.changed_since(before)


def _encoded(row: object, name: str) -> object:
    """Return a row in JSON's types, the inverse of decoded(): bytes as base64, other types as text."""
    try:
        return msgspec.to_builtins(row, str_keys=True, enc_hook=plain)
    except (TypeError, ValueError) as error:
        raise CommandError(
            f"table {name}: a row of type {type(row).__name__} cannot be JSON: {error}"
        ) from None


def _line(at: float, name: str, seen: Snapshot[Any, Any], keys: Sequence[Hashable]) -> str:
    rows = [(key, seen.get(key)) for key in keys]
    line = TraceLine(
        at,
        name,
        [_encoded(row, name) for _, row in rows if row is not None],
        [plain(key) for key, row in rows if row is None],
    )
    return f"{msgspec.json.encode(line).decode()}\n"
