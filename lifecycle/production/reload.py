"""Reloads settings at SIGHUP: changes are logged, and modules with changed settings restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lifecycle.errors import HiveError, explain
from lifecycle.hive.reload import Reload
from lifecycle.hooks import Lifecycle
from lifecycle.injection import Cell, invoke, module, provide
from lifecycle.jobs import Jobs
from lifecycle.process import Logger
from lifecycle.production.systemd import ServiceManager

__all__ = ["Reloader", "reload"]


class Reloader:
    """Reloads at SIGHUP. Settings with faults change nothing; every fault is logged."""

    def __init__(
        self,
        reload: Reload,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
        manager: ServiceManager | None = None,
    ) -> None:
        self._reload = reload
        self._log = log
        self._manager = manager
        lifecycle.enter("listen for SIGHUP", self._listening)
        jobs.one_shot("reload the settings", self._run)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        with self._reload.listening():
            yield

    async def _run(self) -> None:
        while True:
            await self._reload.requested()
            await self._once()

    async def _once(self) -> None:
        if self._manager is not None:
            self._manager.reloading()
        try:
            result = await self._reload()
        except HiveError as error:
            status = "the settings are as they were: see the log"
            self._log.error("settings not reloaded", error=explain(error))
        else:
            for change in result.changed:
                later = {"in_force": "after a restart"} if change.name in result.at_restart else {}
                self._log.info(
                    "setting changed",
                    name=change.name,
                    before=change.before,
                    after=change.after,
                    origin=change.origin,
                    **later,
                )
            restarted = ", ".join(result.restarted)
            status = f"settings reloaded: {len(result.changed)} changed"
            self._log.info("settings reloaded", changed=len(result.changed), restarted=restarted)
        if self._manager is not None:
            self._manager.reloaded(status)


def reload() -> Cell:
    """Return the module ``reload``: SIGHUP reads the settings again instead of ending the process."""
    return module("reload", "Reads the settings again at SIGHUP", provide(Reloader), invoke(Reloader))
