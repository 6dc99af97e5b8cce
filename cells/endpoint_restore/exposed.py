"""Brings the restored endpoints back: visible all at once, then each made right where it is not.

For:   whoever serves requests about endpoints takes it to start afterwards.
Needs: RestoredEndpoints, Endpoints, Regenerations.   Gives: ExposedEndpoints.
Source: Cilium 1.17, regeneration of restored endpoints.
"""

import time

from cells.endpoint import Endpoints, Level, Regenerations
from cells.endpoint_restore.restored import RestoredEndpoints
from lifecycle import Health, Hook, Lifecycle, Logger


class ExposedEndpoints:
    """The restored endpoints at work again, once its hook has run."""

    def __init__(
        self,
        restored: RestoredEndpoints,
        endpoints: Endpoints,
        *,
        regenerations: Regenerations,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._restored = restored
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._health = health.child("expose")
        self._log = log
        lifecycle.append(Hook("expose endpoints", self._expose))

    async def _expose(self) -> None:
        started = time.perf_counter()
        restored = self._restored.endpoints
        self._endpoints.expose(restored)
        exposed = time.perf_counter()
        asked = [
            self._regenerations.request(endpoint.id, Level.DATAPATH, "syncing state to host")
            for endpoint, _ in restored
        ]
        failed = [one.endpoint_id for one in asked if await one.result()]
        took = round((time.perf_counter() - started) * 1000, 1)
        self._log.info(
            "Finished regenerating restored endpoints",
            regenerated=len(restored) - len(failed),
            total=len(restored),
            exposed_after_milliseconds=round((exposed - started) * 1000, 1),
            milliseconds=took,
        )
        summary = f"{len(restored) - len(failed)} of {len(restored)} regenerated in {took} ms"
        if failed:
            self._health.degraded(f"{summary}; failed, tried again: endpoints {', '.join(map(str, failed))}")
        else:
            self._health.ok(summary)
