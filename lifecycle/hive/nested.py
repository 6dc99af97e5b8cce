"""Inner hives: hives that start and stop, any number of times, while an outer hive runs.

    class LeaderHive(InnerHive):
        \"\"\"The cells of the leader.\"\"\"

    leader = nest(LeaderHive, "leader", "Runs on the leader", *cells, share=(Kube, Table[str, Node]))

    class Election:
        def __init__(self, inner: LeaderHive, jobs: Jobs) -> None:
            jobs.one_shot("lead", inner.run)       # or, in a hook or a job: async with inner.started(): ...

An inner hive is checked, drawn and configured as a part of the outer hive. Its settings are settings of the
outer hive; its modules, health, jobs, timings and tables have ids below that of nest(). Each start builds new
instances, except those shared with the outer hive. The constructor that takes the inner hive also depends on
the shared instances, so they outlive it. Errors inside are raised to the caller; a job contains and retries
them.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from lifecycle.hints.keys import Key
from lifecycle.hints.places import Place, caller
from lifecycle.hive.hive import Hive
from lifecycle.hive.inner import Inner
from lifecycle.hive.nesting import PLAN, Findings, Holder, Nesting
from lifecycle.injection.cells import Cell, ModuleCell, ProvideCell, SupplyCell
from lifecycle.process.health import Health

if TYPE_CHECKING:
    from lifecycle.graph.value import Graph

__all__ = ["InnerHive", "Plan", "nest"]


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The class, cells and shared types of an inner hive."""

    cells: tuple[Cell, ...]
    share: tuple[Key, ...]
    place: Place

    def hive(self, nesting: Nesting, values: Mapping[Key, object] | None = None) -> Inner:
        """Return a hive of these cells inside another one; without values, it can only be checked."""
        has_values = values is not None
        shared = ((key, values[key] if values is not None else _VALUE) for key in self.share)
        cells = (*self.cells, *(SupplyCell(self.place, value, key, has_values) for key, value in shared))
        return Inner(cells, nesting)

    def findings(self, nesting: Nesting) -> Findings:
        """Faults and settings that it would have there."""
        return self.hive(nesting).findings()


class InnerHive(Holder):
    """A hive that runs inside a hook or a job of another hive. Derive a class from this for each."""

    def __init__(self, plan: Plan, nesting: Nesting, values: Mapping[Key, object]) -> None:
        self._plan = plan
        self._nesting = nesting
        self._values = values
        self._health = Health(nesting.health, nesting.scope.id)
        self.current: Inner | None = None
        """The running hive, from its start to the end of its stop."""

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Hive]:
        """The hive, newly built and started; stopped at the end of the block, even if that is cancelled.

        The block is cancelled if a hook crashes or the inner Shutdown is requested with an error. Raises what
        Hive.start() and Hive.stop() raise, and that error; RuntimeError if it runs already.
        """
        if self.current is not None:
            raise RuntimeError(f"{self.current.name} runs already: an inner hive runs once at a time")
        self.current = hive = self._plan.hive(self._nesting, self._values)
        hive.clear_profile()
        self._health.remove()
        try:
            self._health.ok("starting")
            async with hive.started():
                self._health.ok("running")
                yield hive
        except Exception as error:
            self._ended()
            self._health.degraded("failed", error)
            raise
        except BaseException:
            self._ended()
            raise
        else:
            self._ended()
        finally:
            self.current = None

    async def run(self) -> None:
        """Run until Shutdown is requested inside, or until cancelled. Raises what started() raises."""
        stop_requested = anyio.Event()
        async with self.started() as hive:
            hive.shutdown.listen(stop_requested.set)
            await stop_requested.wait()

    def graph(self) -> "Graph":
        """Return the graph of the running hive, or of a new one with the same cells."""
        if self.current is not None:
            return self.current.graph()
        like = self._plan.hive(self._nesting, self._values)
        try:
            return like.graph()
        finally:
            like.forget_jobs()  # remove their entries, which would collide with those of the running hive

    def built(self) -> list[object]:
        """Return the instances that are built in the running hive."""
        return [] if self.current is None else self.current.built()

    def _ended(self) -> None:
        """Remove its reports from health."""
        assert self.current is not None  # noqa: S101  # only called by started()
        self.current.forget_jobs()
        self._health.remove()
        self._health.stopped("not running")


def nest(
    kind: type[InnerHive],
    id: str,  # noqa: A002  # the field's word, as module() has it
    title: str,
    *cells: Cell,
    share: Iterable[Any] = (),
) -> Cell:
    """Return a module that provides `kind`, an inner hive of these cells; the constructor that takes it runs
    it.

    Its constructors see only the types in `share` of the outer hive. It has four fifths of the stop timeout
    of the outer hive's hooks to stop.
    """
    plan = Plan(cells, tuple(share), caller())
    return ModuleCell(
        plan.place, id, title, (ProvideCell(plan.place, (_constructor(kind, plan),), private=False),)
    )


def _constructor(kind: type[InnerHive], plan: Plan) -> Callable[..., InnerHive]:
    """Return a constructor of `kind` with a parameter for each shared value, so that the graph shows them."""

    def build(nesting: Nesting, **values: object) -> InnerHive:
        return kind(plan, nesting, dict(zip(plan.share, values.values(), strict=True)))

    hints: dict[str, Any] = {"nesting": Nesting}
    hints |= {f"shared_{number}": key for number, key in enumerate(plan.share)}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        for name, hint in hints.items()
    ]
    build.__annotations__ = {**hints, "return": kind}
    build.__signature__ = inspect.Signature(parameters, return_annotation=kind)  # type: ignore[attr-defined]  # as documented
    build.__wrapped__ = kind  # type: ignore[attr-defined]  # messages show where the class is written
    build.__name__, build.__qualname__, build.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    setattr(build, PLAN, plan)
    return build


_VALUE = object()
