"""Tells how the start went, once everything that pods and probes wait for has started.

Needs: Profile, HealthServer.   Gives: Bootstrap.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cells.health import HealthServer
from lifecycle import Hook, Lifecycle, Logger, Profile

if TYPE_CHECKING:  # what is imported below is imported once probes are answered: nobody waits for it
    from cells.bootstrap.scopes import Scopes


class Bootstrap:
    """The bootstrap statistics of this start."""

    def __init__(self, profile: Profile, _probed: HealthServer, *, lifecycle: Lifecycle, log: Logger) -> None:
        self._profile = profile
        self._log = log
        self._before = 0.0
        self._overall: float | None = None
        lifecycle.append(Hook("tell how the start went", self._tell))

    def scopes(self) -> Scopes:
        """Every scope so far; ``overall`` once probes are answered."""
        from cells.bootstrap.scopes import scopes_of

        return scopes_of(self._profile, self._before, self._overall)

    async def _tell(self) -> None:
        from lifecycle.process_age import process_age

        self._overall = process_age()
        self._before = max(self._overall - (time.perf_counter() - self._profile.origin), 0.0)
        scopes = self.scopes()
        self._profile.sums.update(scopes.succeeded)
        rounded = {scope: round(seconds, 4) for scope, seconds in scopes.succeeded.items()}
        self._log.info("Daemon initialization completed", **rounded)
