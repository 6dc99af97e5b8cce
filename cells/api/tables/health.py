"""The health of modules as the table that Cilium's clients ask for: ``cilium-dbg statedb health``.

Needs: HealthTree.   Gives: HealthTable.
Source: Cilium 1.17, GET /statedb/query with its JSON body; a row for each line of the answer.
"""

from __future__ import annotations

import binascii

import msgspec

from cells.api.models.hive import Failure, HealthID, HealthRow, HealthStatusRow, Query
from cells.api.operations.endpoints.mapping import rfc3339
from cells.api.operations.status.controllers import NEVER
from cells.api.operations.status.mapping import LEVELS
from cells.api.part import ApiPart, Route
from cells.api.wire import JSON, answer, read_body
from lifecycle import HealthStatus, HealthTree, Member
from lifecycle.http import Request, Response

TABLE, BY_ID, BY_REVISION = "health", "identifier", "__revision__"
MODULE_PARTS = 2
"""Of an id such as ``agent.ipam.expire`` the first so many name the module, the others its part."""


class HealthTable:
    """Answers queries of the table ``health``; there is no other in Cilium's form."""

    def __init__(self, health: HealthTree) -> None:
        self._health = health

    async def query(self, request: Request) -> Response:
        """GET /statedb/query: 404 for another table, 400 for an index or key that is none."""
        asked = read_body(request, Query, "query")
        if asked.table != TABLE:
            return answer(404, Failure(err=f"table {asked.table!r} not found"))
        if asked.index not in (BY_ID, BY_REVISION):
            return answer(400, Failure(err=f"no index {asked.index!r}: expected {BY_ID} or {BY_REVISION}"))
        try:
            key = binascii.a2b_base64(asked.key, strict_mode=True) if asked.key else b""
        except (binascii.Error, ValueError) as error:
            return answer(400, Failure(err=f"key is not base64: {error}"))
        told = [each for each in self._health.snapshot() if each.level != "unknown"]
        lines = []
        for revision, status in enumerate(told, start=1):
            own = status.module.encode() if asked.index == BY_ID else revision.to_bytes(8, "big")
            if own == key or (asked.lowerbound and own > key):
                lines.append(msgspec.json.encode(HealthRow(rev=revision, obj=_row(status))))
        return Response(200, b"".join(line + b"\n" for line in lines), JSON)


def _row(status: HealthStatus) -> HealthStatusRow:
    parts, when = status.module.split("."), rfc3339(status.since)
    stopped = status.level == "stopped"
    return HealthStatusRow(
        id=HealthID(module=parts[:MODULE_PARTS], component=parts[MODULE_PARTS:]),
        level=LEVELS[status.level],
        message=status.message,
        error=status.error or "",
        last_ok=when if status.level == "ok" else NEVER,
        updated=when,
        stopped=when if stopped else NEVER,
        final=status.message if stopped else "",
        count=1,
    )


def part(table: HealthTable) -> Member[ApiPart]:
    """As a part of the API."""
    return ApiPart("health-table", [Route("GET", "/statedb/query", table.query)])
