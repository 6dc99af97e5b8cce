"""Tells how the start went, once everything that pods and probes wait for has started.

Needs: Profile, HealthServer.   Gives: Bootstrap, tell_once_probed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cells.observe.health import HealthServer
from lifecycle import Hook, Lifecycle, Logger, Profile, after

if TYPE_CHECKING:  # the imports below run once probes are answered, so nothing waits for them
    from cells.observe.bootstrap.scopes import Scopes


class Bootstrap:
    """The bootstrap statistics of this start. Whoever takes it waits for nothing."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._before = 0.0
        self._overall: float | None = None

    def scopes(self) -> Scopes:
        """Every scope so far; ``overall`` once probes are answered."""
        from cells.observe.bootstrap.scopes import scopes_of

        return scopes_of(self._profile, self._before, self._overall)

    def complete(self) -> Scopes:
        """Probes are answered from now on; what every scope took."""
        from lifecycle.process import process_age

        self._overall = process_age()
        self._before = max(self._overall - (time.perf_counter() - self._profile.origin), 0.0)
        scopes = self.scopes()
        self._profile.sums.update(scopes.succeeded)
        return scopes


@after(HealthServer)
def tell_once_probed(bootstrap: Bootstrap, lifecycle: Lifecycle, log: Logger) -> None:
    """Log the scopes in one line when the port that probes ask is served."""

    async def tell() -> None:
        scopes = bootstrap.complete().succeeded
        log.info(
            "Daemon initialization completed", **{scope: round(took, 4) for scope, took in scopes.items()}
        )

    lifecycle.append(Hook("report how the start went", tell))
