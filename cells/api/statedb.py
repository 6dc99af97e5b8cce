"""The agent's tables: listed, dumped, and streamed as they change.

Needs: Tables.   Gives: StateDB.
Source: the paths and ``{rev, obj}`` of spec api.md §8; ``key``, ``deleted`` and /statedb/tables are ours.
Read only; outside /v1, which is Cilium's document.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import msgspec

from cells.api.hive_models import Failure, TableChange, TableInfo, TableRow
from cells.api.plain import plain
from cells.api.wire import JSON, answer
from cells.http import Request, Response
from lifecycle import Change, ReadTable, Tables
from lifecycle.changes import Changes

KEEPALIVE = 30.0
"""Seconds of silence after which a stream sends an empty line: writing finds out whether someone reads."""


class StateDB:
    """Answers with the tables as they are. A reader that is slow is told less, not later: changes merge."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._watched: set[Changes[Any]] = set()
        self._closed = False

    async def list_tables(self, _request: Request) -> Response:
        """GET /statedb/tables: what each table is called, how large it is, whom it waits for."""
        return answer(
            200,
            [
                TableInfo(
                    name=table.name,
                    rows=len(table),
                    revision=table.revision,
                    initialized=table.initialized,
                    waits_for=table.uninitialized_by,
                )
                for table in self._tables.all()
            ],
        )

    async def dump_all(self, _request: Request) -> Response:
        """GET /statedb/dump: every row of every table, by the table's name."""
        return answer(200, {table.name: _rows(table) for table in self._tables.all()})

    async def dump(self, request: Request) -> Response:
        """GET /statedb/dump/{table}: every row of one table, under its name; 404 when there is none."""
        try:
            table = self._tables.get(request.match_info["table"])
        except LookupError as error:
            return answer(404, Failure(err=str(error)))
        return answer(200, {table.name: _rows(table)})

    async def changes(self, request: Request) -> Response:
        """GET /statedb/changes/{table}: a line of JSON for every row there is, then for every change.

        Without end, with empty lines in between; a line ``{"err": ..}`` is the last.
        """
        try:
            table = self._tables.get(request.match_info["table"])
        except LookupError as error:
            return answer(404, Failure(err=str(error)))
        return Response(200, self._lines(table), JSON)

    def open(self) -> None:
        """Let streams go on for ever: the server starts, perhaps again."""
        self._closed = False

    def close(self) -> None:
        """End the streams: the server stops."""
        self._closed = True
        for changes in self._watched:
            changes.wake()

    async def _lines(self, table: ReadTable[Any]) -> AsyncGenerator[bytes, None]:
        changes = table.changes()
        self._watched.add(changes)
        try:
            while not self._closed:
                batch = changes.take()
                yield b"".join(map(_line, batch)) if batch else b"\n"
                with anyio.move_on_after(KEEPALIVE):
                    await changes.wait()
        except Exception as error:  # noqa: BLE001  # a derived table may break meanwhile: its reader is told
            yield msgspec.json.encode(Failure(err=f"{type(error).__name__}: {error}")) + b"\n"
        finally:
            self._watched.discard(changes)


def _line(change: Change[Any]) -> bytes:
    row = change.old if change.deleted else change.row
    line = TableChange(rev=change.revision, key=plain(change.key), obj=plain(row), deleted=change.deleted)
    return msgspec.json.encode(line) + b"\n"


def _rows(table: ReadTable[Any]) -> list[TableRow]:
    return [
        TableRow(rev=revision, key=plain(key), obj=plain(row))
        for key, row, revision in table.snapshot().items()
    ]
