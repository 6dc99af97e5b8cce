"""What ``hive inspect --live`` and ``--timeline`` ask: the agent's own graph, and how its start went.

Needs: HiveView.   Gives: Inspection.
The paths are outside /v1: that is Cilium's document. The forms are docs/graph-schema.json and
docs/timeline-schema.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio.to_thread

from cells.api.wire import json_answer
from lifecycle import HiveView

if TYPE_CHECKING:
    from aiohttp import web


class Inspection:
    """Answers with the hive as it shows itself; read only."""

    def __init__(self, view: HiveView) -> None:
        self._view = view

    async def get_graph(self, _request: web.Request) -> web.Response:
        """GET /hive/graph."""
        return json_answer(await anyio.to_thread.run_sync(lambda: self._view.graph().json()))

    async def get_timeline(self, _request: web.Request) -> web.Response:
        """GET /hive/timeline; complete for hooks that have started by now."""
        return json_answer(
            await anyio.to_thread.run_sync(lambda: self._view.timeline(self._view.graph()).json())
        )
