"""The implementation of an InnerHive: its health, jobs and hooks appear in those of the outer hive."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from lifecycle.hive.hive import Hive
from lifecycle.hive.nesting import Findings, Nesting
from lifecycle.hive.switch import Modules
from lifecycle.injection.cells import Cell
from lifecycle.settings.sources import Loaded

__all__ = ["Inner"]

STOP_SHARE = 0.8
"""Part of its hook's stop timeout that an inner hive may use: the hook must still report the result."""


class Inner(Hive):
    """A hive below a module of another hive, with the settings, logger and deadlines of that hive."""

    def __init__(self, cells: Iterable[Cell], nesting: Nesting) -> None:
        start, stop = nesting.limits
        super().__init__(
            *cells,
            name=nesting.scope.id,
            log=nesting.log,
            sequential=nesting.sequential,
            start_timeout=start,
            stop_timeout=stop,
            stop_budget=min(nesting.stop_budget, stop * STOP_SHARE),
        )
        self.profile, self.health, self.jobs = nesting.profile, nesting.health, nesting.jobs
        self.events = nesting.events
        self.modules = Modules(nesting.scope.id, self.health, self.events)
        self._outer = nesting
        self._root = nesting.scope

    def findings(self) -> Findings:
        """Return its findings, which the outer hive checks with its own."""
        return Findings(self._faults, self._located_groups)

    def built(self) -> list[object]:
        """Return the instances in it."""
        return self._built()

    def clear_profile(self) -> None:
        """Drop the timings of an earlier run."""
        self.profile.forget({(node.scope.id, node.name) for node in self._resolution.nodes})

    def forget_jobs(self) -> None:
        """Remove health and metrics of its jobs from those of the outer hive."""
        for jobs in self._jobs.values():
            jobs.forget()

    @functools.cached_property
    def _loaded(self) -> Loaded:
        """The settings that the outer hive has loaded for both, with their warnings."""
        return msgspec.structs.replace(self._outer.loaded(), warnings=[])

    def _load(self, config_dirs: Sequence[Path] = ()) -> Loaded:
        return self._outer.load(config_dirs)
