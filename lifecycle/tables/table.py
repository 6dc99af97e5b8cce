"""A table: rows by key, with one writer and many watchers."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, TypeVar

import anyio

from lifecycle.tables.core import commit_together
from lifecycle.tables.indexes import IndexSpec
from lifecycle.tables.read_table import ReadTable

__all__ = ["Initializer", "Table", "Transaction", "Transactions", "sources_return", "transaction"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


_returning: ContextVar[bool] = ContextVar("sources come back", default=False)


@contextmanager
def sources_return() -> Iterator[None]:
    """A block in which new initializers replace those that tables had before."""
    token = _returning.set(True)
    try:
        yield
    finally:
        _returning.reset(token)


class Initializer:
    """A source that has not yet filled the table. done() may be called several times."""

    __slots__ = ("_table", "name")

    def __init__(self, table: "Table[Any, Any]", name: str) -> None:
        self._table = table
        self.name = name

    def done(self) -> None:
        """The source has written all its initial rows."""
        self._table._initializer_done(self)  # noqa: SLF001  # the two are one mechanism


class Transaction(Generic[Key, Row]):
    """Writes that become visible together when the `with` block ends, or not at all if it raises."""

    __slots__ = ("_closed", "_table", "_writes")

    def __init__(self, table: "Table[Key, Row]") -> None:
        self._table = table
        self._writes: dict[Key, Row | None] = {}
        self._closed = "not open: write inside `with table.txn() as rows:`"

    def put(self, row: Row) -> None:
        """Insert the row, or replace the row with its key."""
        if self._closed:
            raise self._outside()
        key = self._table.key(row)
        try:
            self._writes[key] = row
        except TypeError as error:
            raise TypeError(f"table {self._table.name}: the key {key!r} of a row: {error}") from None

    def delete(self, key: Key) -> None:
        """Delete the row with this key, if any."""
        if self._closed:
            raise self._outside()
        self._writes[key] = None

    def replace_all(self, rows: Iterable[Row]) -> None:
        """Make these the only rows: rows with other keys are deleted."""
        writes, key = self._usable(), self._table.key
        new: dict[Key, Row | None] = {key(row): row for row in rows}
        for present in (*self._table._rows, *writes):  # noqa: SLF001  # the two are one mechanism
            writes[present] = None
        writes.update(new)

    def get(self, key: Key) -> Row | None:
        """Return the row with this key, with the writes of this transaction."""
        writes = self._usable()
        return writes[key] if key in writes else self._table.get(key)

    def __enter__(self) -> "Transaction[Key, Row]":
        if self._table._open is not None:  # noqa: SLF001
            raise self._table._open_already()  # noqa: SLF001
        self._table._open = self  # noqa: SLF001
        self._closed = ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = "over; open another one"
        table = self._table
        table._open = None  # noqa: SLF001
        if kind is None:
            table._commit(self._writes)  # noqa: SLF001

    def _end(self) -> dict[Key, Row | None]:
        self._closed = "over; open another one"
        self._table._open = None  # noqa: SLF001
        return self._writes

    def _usable(self) -> dict[Key, Row | None]:
        if self._closed:
            raise self._outside()
        return self._writes

    def _outside(self) -> RuntimeError:
        return RuntimeError(f"table {self._table.name}: this transaction is {self._closed}")


class Transactions:
    """Writes to several tables that become visible together: ``rows[pods]`` is the Transaction of `pods`."""

    __slots__ = ("_all",)

    def __init__(self, tables: "Iterable[Table[Any, Any]]") -> None:
        self._all = {id(table): (table, Transaction(table)) for table in tables}

    def __getitem__(self, table: "Table[Key, Row]") -> Transaction[Key, Row]:
        """Return the transaction of a table. Raises LookupError if it was not passed to transaction()."""
        if (entry := self._all.get(id(table))) is None:
            names = ", ".join(member.name for member, _ in self._all.values())
            raise LookupError(
                f"table {table.name} is not in this transaction; it is of: {names or 'no table'}"
            )
        return entry[1]

    def __enter__(self) -> "Transactions":
        for table, _ in self._all.values():
            if table._open is not None:  # noqa: SLF001  # they are one mechanism
                raise table._open_already()  # noqa: SLF001
        for _, rows in self._all.values():
            rows.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writes = [(table, rows._end()) for table, rows in self._all.values()]  # noqa: SLF001
        if kind is None:
            commit_together(writes)


def transaction(*tables: "Table[Any, Any]") -> Transactions:
    """Write to several tables: all changes become visible together when the `with` block ends, or none.

    Synchronous, without an await inside. Raises RuntimeError if one of them has an open transaction and, at
    the end, the errors of single transactions: then no table has changed. Raises TypeError for a derived
    table.
    """
    for table in tables:
        if not isinstance(table, Table):
            raise TypeError(
                f"transaction() of {getattr(table, 'name', table)!r}: expected a Table to write to"
            )
    return Transactions(tables)


class Table(ReadTable[Key, Row]):
    """Rows by key. Writing an equal row changes nothing.

    `indexes` are functions without side effects from a row to the values by which by() finds it.
    """

    def __init__(
        self, name: str, key: Callable[[Row], Key], *, indexes: Mapping[str, IndexSpec[Row]] | None = None
    ) -> None:
        if not callable(key):
            raise TypeError(f"table {name}: its key is {key!r}: expected a function from a row to its key")
        super().__init__(name, indexes)
        self.key = key
        self._pending: set[Initializer] = set()
        self._event: anyio.Event | None = None
        self._open: Transaction[Key, Row] | None = None

    def put(self, row: Row) -> None:
        """Insert the row, or replace the row with its key, in a transaction of its own.

        As ``with table.txn() as rows: rows.put(row)``, in half the time.
        """
        if self._open is not None:
            raise self._open_already()
        key = self.key(row)
        try:
            writes: dict[Key, Row | None] = {key: row}
        except TypeError as error:
            raise TypeError(f"table {self.name}: the key {key!r} of a row: {error}") from None
        self._commit(writes)

    def delete(self, key: Key) -> None:
        """Delete the row with this key, if any, in a transaction of its own; as put()."""
        if self._open is not None:
            raise self._open_already()
        if key in self._rows:
            self._commit({key: None})

    def txn(self) -> Transaction[Key, Row]:
        """Open a transaction: synchronous, without an await inside. Raises RuntimeError if one is open."""
        return Transaction(self)

    def initializer(self, name: str = "") -> Initializer:
        """Register a source: the table is initialized once all its sources are done().

        Call it in constructors. Raises RuntimeError if the initialized table has been observed; but a source
        of a module that is enabled again may return: then the table waits for it again.
        """
        if _returning.get():
            # drop the one from before the module was disabled
            self._pending = {pending for pending in self._pending if pending.name != name}
        if self._event is not None and self._event.is_set():
            if not _returning.get():
                raise RuntimeError(
                    f"table {self.name} is initialized already: announce sources in constructors"
                )
            self._event = None
        initializer = Initializer(self, name)
        self._pending.add(initializer)
        return initializer

    @property
    def uninitialized_by(self) -> list[str]:
        """The sources that are not done."""
        return sorted(initializer.name for initializer in self._pending)

    async def wait_initialized(self) -> None:
        """Wait until the table is initialized. Raises TableClosedError if it is closed before."""
        if self._event is None:
            self._event = anyio.Event()
            if not self._pending or self._closed:
                self._event.set()
        await self._event.wait()
        if self._pending:
            self.check_open()

    def close(self, why: str) -> None:
        """End every wait with TableClosedError, as nothing changes any more. Rows stay readable."""
        super().close(why)
        if self._event is not None:
            self._event.set()

    def _initializer_done(self, initializer: Initializer) -> None:
        self._pending.discard(initializer)
        if not self._pending and self._event is not None:
            self._event.set()

    def _open_already(self) -> RuntimeError:
        return RuntimeError(f"table {self.name}: a transaction is open already; a table has one writer")
