"""What ``hive inspect --live``, ``--timeline`` and ``hive config`` ask: graph, start, settings; load.
Needs: HiveView, ConfigDrift.   Gives: Inspection.
The paths are outside /v1: that is Cilium's document. The forms are docs/graph-schema.json and
docs/timeline-schema.json.
"""

from __future__ import annotations

import asyncio

import anyio.to_thread

from cells.api.models.hive import Failure, LoopLoad, Setting, Settings
from cells.api.part import ApiPart, Route
from cells.api.wire import answer, json_answer
from cells.config.drift import ConfigDrift
from lifecycle import HiveView, Member
from lifecycle.http import Request, Response
from lifecycle.process import BOUNDS, LoopLag


class Inspection:
    """Answers with the hive as it shows itself; read only."""

    def __init__(self, view: HiveView, drift: ConfigDrift) -> None:
        self._view = view
        self._drift = drift

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/hive/graph", self.get_graph),
            Route("GET", "/hive/timeline", self.get_timeline),
            Route("GET", "/hive/loop", self.get_loop),
            Route("GET", "/hive/config", self.get_config),
        ]

    async def get_graph(self, _request: Request) -> Response:
        """GET /hive/graph."""
        return json_answer(await anyio.to_thread.run_sync(lambda: self._view.graph().json()))

    async def get_timeline(self, _request: Request) -> Response:
        """GET /hive/timeline; complete for hooks that have started by now."""
        return json_answer(
            await anyio.to_thread.run_sync(lambda: self._view.timeline(self._view.graph()).json())
        )

    async def get_config(self, _request: Request) -> Response:
        """GET /hive/config: every setting in force, and what a restart would change."""
        settings = [
            Setting(name=one.option.name, value=one.text, origin=one.origin) for one in self._drift.settings()
        ]
        return answer(
            200, Settings(places=self._drift.places, settings=settings, changes=self._drift.changes)
        )

    async def get_loop(self, _request: Request) -> Response:
        """GET /hive/loop: how busy the event loop was; 404 when the hive does not own its event loop."""
        lag = LoopLag.of(asyncio.get_running_loop())
        if lag is None:
            return answer(404, Failure(err="this event loop is not measured"))
        stretches = lag.stretches
        return answer(
            200,
            LoopLoad(
                bounds=BOUNDS,
                counts=stretches.counts,
                longest=lag.longest,
                p99=stretches.within(0.99),
                p99_9=stretches.within(0.999),
            ),
        )


def part(inspection: Inspection) -> Member[ApiPart]:
    """As a part of the API."""
    return ApiPart("inspection", inspection.routes())
