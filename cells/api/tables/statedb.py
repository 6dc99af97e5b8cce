"""The agent's tables: listed, dumped, and streamed as they change.

Needs: Tables.   Gives: StateDB.
Source: the paths and ``{rev, obj}`` of spec api.md §8; ``key``, ``deleted`` and /statedb/tables are ours.
Read only; outside /v1, which is Cilium's document.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from cells.api.models.hive import Failure
from cells.api.part import ApiPart, Route
from cells.api.wire import JSON, answer
from lifecycle import Member, ReadTable, Tables, snapshot
from lifecycle.admin import Follower, rows, tables_info
from lifecycle.http import Request, Response

KEEPALIVE = 30.0
"""Seconds of silence after which a stream sends an empty line: writing finds out whether someone reads."""


class StateDB:
    """Answers with the tables as they are, in the words of lifecycle.admin, which the shell has too."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._follower = Follower()

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/statedb/tables", self.list_tables),
            Route("GET", "/statedb/dump", self.dump_all),
            Route("GET", "/statedb/dump/{table}", self.dump),
            Route("GET", "/statedb/changes/{table}", self.changes),
        ]

    async def list_tables(self, _request: Request) -> Response:
        """GET /statedb/tables: what each table is called, how large it is, whom it waits for."""
        return answer(200, tables_info(self._tables))

    async def dump_all(self, _request: Request) -> Response:
        """GET /statedb/dump: every row of every table, by the table's name."""
        return self._dump(*self._tables.all())

    async def dump(self, request: Request) -> Response:
        """GET /statedb/dump/{table}: every row of one table, under its name; 404 when there is none."""
        try:
            table = self._tables.get(request.match_info["table"])
        except LookupError as error:
            return answer(404, Failure(err=str(error)))
        return self._dump(table)

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
        self._follower.open()

    def close(self) -> None:
        """End the streams: the server stops."""
        self._follower.close()

    def _dump(self, *tables: ReadTable[Any]) -> Response:
        """An object with the rows of each table, of one moment, sent in slices."""
        held = snapshot(*tables)

        async def parts() -> AsyncGenerator[bytes, None]:
            before = b"{"
            for table in tables:
                yield before + msgspec.json.encode(table.name) + b":["
                comma = b""
                async with aclosing(rows(held[table])) as slices:
                    async for part in slices:
                        yield comma + b",".join(map(msgspec.json.encode, part))
                        comma = b","
                yield b"]"
                before = b","
            yield b"}" if tables else b"{}"

        return Response(200, parts(), JSON)

    async def _lines(self, table: ReadTable[Any]) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._follower.follow(table, KEEPALIVE)) as batches:
                async for batch in batches:
                    yield b"".join(msgspec.json.encode(one) + b"\n" for one in batch) or b"\n"
        except Exception as error:  # noqa: BLE001  # a derived table may fail; the client gets the error
            yield msgspec.json.encode(Failure(err=f"{type(error).__name__}: {error}")) + b"\n"


def part(tables: StateDB) -> Member[ApiPart]:
    """As a part of the API."""
    return ApiPart("tables", tables.routes(), tables.open, tables.close)
