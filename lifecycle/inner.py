"""The hive behind an InnerHive: a hive that tells of itself in the trees of the one around it.

Needs:  the hive around it, cells.
Gives:  Inner.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from lifecycle.cells import Cell
from lifecycle.constructors import Scope
from lifecycle.hive import Hive
from lifecycle.sources import Loaded
from lifecycle.switch import Modules

__all__ = ["Inner"]

STOP_SHARE = 0.8
"""The part of a hook's time to stop that an inner hive may take: the hook around it has to tell of it."""


class Inner(Hive):
    """A hive below a module of another: with the settings, logger and deadlines of that one."""

    def __init__(self, cells: Iterable[Cell], outer: Hive, scope: Scope, stop_budget: float | None) -> None:
        start, stop = outer._limits  # noqa: SLF001  # another hive's
        budget = min(outer._stop_budget, stop * STOP_SHARE) if stop_budget is None else stop_budget  # noqa: SLF001
        super().__init__(
            *cells,
            name=scope.id,
            log=outer._base_log,  # noqa: SLF001
            sequential=outer._sequential,  # noqa: SLF001
            start_timeout=start,
            stop_timeout=stop,
            stop_budget=budget,
        )
        self.profile, self.health, self.jobs = outer.profile, outer.health, outer.jobs
        self.modules = Modules(scope.id, self.health)
        self._outer = outer
        self._root = scope

    def clear_profile(self) -> None:
        """Drop the timings of an earlier run."""
        self.profile.forget({(node.scope.id, node.name) for node in self._resolution.nodes})

    def forget_jobs(self) -> None:
        """Take the health and the metrics of the jobs out of the trees."""
        for jobs in self._jobs.values():
            jobs.forget()

    @functools.cached_property
    def _loaded(self) -> Loaded:
        """What the outer hive has loaded for both, and warned of."""
        return msgspec.structs.replace(self._outer._loaded, warnings=[])  # noqa: SLF001

    def _load(self, config_dirs: Sequence[Path] = ()) -> Loaded:
        return self._outer._load(config_dirs)  # noqa: SLF001
