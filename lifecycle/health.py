"""Health: a tree of who is well, who is not, and since when.

Needs:  nothing.
Gives:  Health to report with (injectable, module scoped) and HealthTree to look at (injectable, whole hive).
"""

import time
from collections.abc import Callable
from typing import Literal

import msgspec

__all__ = ["Health", "HealthStatus", "HealthTree", "Level"]

Level = Literal["ok", "degraded", "stopped", "unknown"]


class HealthStatus(msgspec.Struct, frozen=True):
    """What one reporter said last."""

    module: str
    """The full id of the module, and below it the names of children: ``agent.ipam.expire``."""
    level: Level
    """``unknown`` until the first report."""
    message: str
    since: float
    """When the level came to be, in seconds since the epoch."""
    error: str | None = None


class HealthTree:
    """Everyone's last report."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._statuses: dict[str, HealthStatus] = {}

    def snapshot(self) -> list[HealthStatus]:
        """Every status, sorted by module."""
        return sorted(self._statuses.values(), key=lambda status: status.module)

    def reporter(self, module: str) -> "Health":
        """The Health that reports as `module`; its status is unknown until it does."""
        self._statuses.setdefault(module, HealthStatus(module, "unknown", "", self._clock()))
        return Health(self, module)

    def report(self, module: str, level: Level, message: str, error: BaseException | None = None) -> None:
        """Put a status in place of the module's last one."""
        before = self._statuses.get(module)
        since = before.since if before is not None and before.level == level else self._clock()
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._statuses[module] = HealthStatus(module, level, message, since, text)


class Health:
    """Reports how a module is. Injected, it speaks for the module of the constructor that asked for it."""

    __slots__ = ("_module", "_tree")

    def __init__(self, tree: HealthTree, module: str) -> None:
        self._tree = tree
        self._module = module

    def ok(self, message: str = "") -> None:
        """All is well."""
        self._tree.report(self._module, "ok", message)

    def degraded(self, message: str, error: BaseException | None = None) -> None:
        """Something does not work, and is being worked on."""
        self._tree.report(self._module, "degraded", message, error)

    def stopped(self, message: str = "") -> None:
        """It ended, as it should."""
        self._tree.report(self._module, "stopped", message)

    def child(self, name: str) -> "Health":
        """Health of a part, reported under this one's name."""
        return self._tree.reporter(f"{self._module}.{name}")
