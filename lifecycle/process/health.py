"""Health: a tree of modules, each healthy or degraded, and since when."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

import msgspec

from lifecycle.errors import described

__all__ = ["Health", "HealthStatus", "HealthTree", "Level"]

Level = Literal["ok", "degraded", "stopped", "unknown"]


class HealthStatus(msgspec.Struct, frozen=True):
    """The last report of one reporter."""

    module: str
    """The full id of the module, with names of children below it: ``agent.ipam.expire``."""
    level: Level
    """``unknown`` until the first report."""
    message: str
    since: float
    """When it entered this level, in seconds since the epoch."""
    error: str | None = None


class HealthTree:
    """The last report of every reporter."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._statuses: dict[str, HealthStatus] = {}
        self._sorted: list[HealthStatus] | None = None  # cache, until a status changes
        self._below: dict[str, dict[str, None]] = {}  # id -> ids of its children, reporting or not

    def snapshot(self, under: str = "") -> list[HealthStatus]:
        """Return every status, or those of one id and all below it, sorted by module."""
        if under:
            return [
                self._statuses[module] for module in sorted(self._inside(under)) if module in self._statuses
            ]
        if self._sorted is None:
            self._sorted = [self._statuses[module] for module in sorted(self._statuses)]
        return self._sorted.copy()

    def reporter(self, module: str) -> "Health":
        """Return the Health that reports as `module`; its status is unknown until the first report."""
        if module not in self._statuses:
            self._put(HealthStatus(module, "unknown", "", self._clock()))
        return Health(self, module)

    def report(self, module: str, level: Level, message: str, error: BaseException | None = None) -> None:
        """Replace the status of the module."""
        before = self._statuses.get(module)
        previous = None if before is None else (before.level, before.message, before.error)
        if error is None and previous == (level, message, None):
            return
        since = before.since if before is not None and before.level == level else self._clock()
        text = None if error is None else described(error)
        self._put(HealthStatus(module, level, message, since, text))

    def forget(self, module: str) -> None:
        """Remove the statuses of this id and of all below it."""
        self._sorted = None
        for removed in self._inside(module):
            self._statuses.pop(removed, None)
            self._below.pop(removed, None)
        while module:
            parent = module.rpartition(".")[0]
            siblings = self._below.get(parent, {})
            siblings.pop(module, None)
            if siblings:
                return
            self._below.pop(parent, None)
            if parent in self._statuses:
                return
            module = parent  # remove a parent that existed only for its children

    def _put(self, status: HealthStatus) -> None:
        module = status.module
        linked = module in self._statuses
        self._statuses[module] = status
        self._sorted = None
        while not linked and module:
            parent = module.rpartition(".")[0]
            children = self._below.setdefault(parent, {})
            linked = module in children
            children[module] = None
            module = parent

    def _inside(self, module: str) -> list[str]:
        modules = [module]
        for parent in modules:
            modules.extend(self._below.get(parent, ()))
        return modules


class Health:
    """Reports the health of a module. An injected one reports for the module of the receiving constructor."""

    __slots__ = ("_module", "_tree")

    def __init__(self, tree: HealthTree, module: str) -> None:
        self._tree = tree
        self._module = module

    def ok(self, message: str = "") -> None:
        """Report that all is well."""
        self._tree.report(self._module, "ok", message)

    def degraded(self, message: str, error: BaseException | None = None) -> None:
        """Report a failure that is being retried."""
        self._tree.report(self._module, "degraded", message, error)

    def stopped(self, message: str = "") -> None:
        """Report an expected end."""
        self._tree.report(self._module, "stopped", message)

    def child(self, name: str) -> "Health":
        """Health of a part, shown below this one until it is removed.

        For short-lived parts, such as one for each endpoint, call remove() or use it in a ``with`` block.
        """
        return self._tree.reporter(f"{self._module}.{name}")

    def remove(self) -> None:
        """Remove the part and everything below it from health."""
        self._tree.forget(self._module)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
