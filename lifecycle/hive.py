"""The hive: cells, checked, built, started and stopped.

Needs:  cells, settings.   Gives:  Hive.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio

from lifecycle.assembly import assemble
from lifecycle.build import Build
from lifecycle.cells import Cell
from lifecycle.check import check
from lifecycle.constructors import Constructor, Scope
from lifecycle.errors import (
    Fault,
    GraphError,
    HiveError,
    NotStartedError,
    SettingsError,
    ShutdownRequestedError,
    StartError,
    StopError,
)
from lifecycle.health import Health, HealthTree
from lifecycle.hook_nodes import sentence
from lifecycle.hooks import Lifecycle
from lifecycle.job_metrics import JobMetrics
from lifecycle.jobs import Backoff, Jobs
from lifecycle.keys import Key, is_member, type_name, wanted
from lifecycle.logs import Logger, logger_for
from lifecycle.nested import InnerHive, Nesting, plan_of
from lifecycle.pending import awaiting
from lifecycle.places import caller
from lifecycle.profile import Profile
from lifecycle.resolve import Resolution
from lifecycle.settings import Option, Settings, options_of
from lifecycle.shutdown import Shutdown
from lifecycle.sources import Loaded, Setting, Sources, load
from lifecycle.supervisor import (
    DEFAULT_START_TIMEOUT,
    DEFAULT_STOP_BUDGET,
    DEFAULT_STOP_TIMEOUT,
    HookFailure,
    HookNode,
    State,
    Supervisor,
)
from lifecycle.switch import Modules, Site
from lifecycle.tables import Tables
from lifecycle.view import HiveView
from lifecycle.wiring import Wiring

if TYPE_CHECKING:
    from lifecycle.graph import Graph

__all__ = ["Hive"]

T = TypeVar("T")


class Hive:
    """Cells that run together. A hive starts once.

    `settings` are Sources, or for tests a mapping from option names (kebab-case) to values. `sequential`
    starts one hook after the other, in a fixed order, instead of siblings at the same time. The time-outs,
    in seconds, are those of hooks that name none; the stop budget is for all stops together: after it hooks
    are cancelled, and those that run on (a worker thread cannot be cancelled) are named and left behind.
    """

    def __init__(
        self,
        *cells: Cell,
        settings: Sources | Mapping[str, object] | None = None,
        name: str = "hive",
        log: Logger | None = None,
        sequential: bool = False,
        start_timeout: float = DEFAULT_START_TIMEOUT,
        stop_timeout: float = DEFAULT_STOP_TIMEOUT,
        stop_budget: float = DEFAULT_STOP_BUDGET,
    ) -> None:
        self.name = name
        self.profile = Profile()
        """How long every constructor and hook took."""
        self.health = HealthTree()
        self.jobs = JobMetrics()
        """Runs, failures and durations of every job."""
        self.shutdown = Shutdown()
        self.tables = Tables(self._built)
        """Every table, by name."""
        self.log = logger_for(name, log)
        self._cells = cells
        self._root = Scope(name, name, None, caller())
        self._sources = settings
        self._base_log = log
        self._sequential = sequential
        self._limits = (start_timeout, stop_timeout)
        self._stop_budget = stop_budget
        self.modules = Modules(name, self.health)
        """Switches modules off and on."""
        self._wiring = Wiring((start_timeout, stop_timeout), sequential=sequential)
        self._lifecycles: dict[Constructor, Lifecycle] = {}
        self._jobs: dict[Constructor, Jobs] = {}
        self.left_behind: list[str] = []
        """Hooks that ran on, cancelled as they were, when the hive had stopped."""
        self._supervisor: Supervisor | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._body: anyio.CancelScope | None = None

    def check(self) -> None:
        """Raise GraphError with every fault, SettingsError when only settings are at fault."""
        faults = [*self._faults, *self._loaded.faults]
        if faults:
            kind = GraphError if self._faults else SettingsError
            raise kind(self.name, faults)

    def graph(self) -> "Graph":
        """The graph as a value. Builds the objects, which is pure, to know the hooks; starts nothing.

        Raises what check() raises, and BuildError.
        """
        from lifecycle.graft import grafted
        from lifecycle.graph import graph_of  # who only runs a hive never asks

        build = self._construct()
        hooks = Wiring(self._limits, sequential=self._sequential).add(
            build.instances, self._lifecycles, self._jobs
        )
        own = set(self._own_structs)
        settings = [one for one in self._loaded.settings if one.option.struct in own]
        graph = graph_of(self._resolution, build, hooks, settings)
        for inner in self._inner_hives():
            graph = grafted(graph, inner.shown().graph())
        return graph

    def options(self) -> list[Option]:
        """Every setting there is, in the order of the cells. Raises GraphError when the graph has faults."""
        if self._faults:
            raise GraphError(self.name, self._faults)
        return [option for struct in self._structs for option in options_of(struct)]

    def settings(self) -> list[Setting]:
        """Every setting with its value and where that came from. Raises what check() raises."""
        self.check()
        return self._loaded.settings

    def warnings(self) -> list[str]:
        """What is odd about the settings; a start logs it."""
        return self._loaded.warnings

    @overload
    def get(self, kind: type[T]) -> T: ...
    @overload
    def get(self, kind: Callable[..., T]) -> T: ...  # what a Protocol or a NewType is to a type checker
    @overload
    def get(self, kind: object) -> Any: ...  # Annotated with a name
    def get(self, kind: object) -> object:
        """What the graph holds for a type, private ones too when there is only one. Builds nothing.

        ``list[Member[T]]`` is every member that was built. What is decorated in a part of the hive only is
        given as it is, what is decorated in all of it with the decoration.

        Raises NotStartedError when it was not built: the hive has not started, or nothing invoked needs it.
        """
        whole = (self.health, self.jobs, self.modules, self.shutdown, self.tables)
        if (own := {type(one): one for one in whole}.get(kind)) is not None:  # type: ignore[call-overload]
            return own
        asked = wanted(kind)
        found = self._resolution.held(asked.key)
        built = self._build.instances if "_build" in self.__dict__ else {}
        held = [node for node in found if node in built]
        if asked.collect is not None and built and (held or not found):
            grouped = len(held) != 1 or is_member(held[0].key)
            return asked.collect([built[node] for node in held] if grouped else built[held[0]])
        if len(held) == 1:
            return built[held[0]]
        name = type_name(kind)
        if len(held) > 1:
            raise HiveError(
                f"{name} is provided privately by {' and by '.join(map(str, held))}: get() cannot choose"
            )
        if not found:
            raise HiveError(f"nothing in {self.name} provides {name}")
        if not built:
            raise NotStartedError(f"{name} does not exist yet: {self.name} has not started")
        if (module := self.modules.why_down(found[0])) is not None:
            raise NotStartedError(f"{name} is not there: module {module} is disabled")
        raise NotStartedError(f"{name} was not built: nothing invoked needs it; add invoke({name})")

    async def start(self) -> None:
        """Build everything and start every hook.

        When one fails or is overdue, or this is cancelled, every hook that had started is stopped again.
        Raises what check() raises, BuildError, StartError.
        """
        if self._supervision is not None:
            raise RuntimeError(f"{self.name} was started before: a hive starts once")
        build = self._construct()
        for warning in self._loaded.warnings:
            self.log.warning(warning)
        for lifecycle in self._lifecycles.values():
            lifecycle.seal()
        supervisor = Supervisor(
            self._hooks(build),
            profile=self.profile,
            log=self.log,
            on_crash=self._on_crash,
            stop_budget=self._stop_budget,
        )
        self._supervisor = supervisor
        site = Site(build, self._wiring, self._lifecycles, self._jobs, self._hooks, self.profile)
        self.modules.open(self._resolution, site, supervisor)
        self.shutdown.listen(self._on_shutdown)
        # a task of its own, so that no cancel scope around the caller reaches it
        self._supervision = asyncio.create_task(supervisor.run(), name=f"{self.name}: hooks")
        try:
            with awaiting(supervisor.pending):
                await supervisor.first.settled.wait()
        except BaseException:
            supervisor.stop()
            await self._over(supervisor)
            raise
        if not supervisor.stopping:
            return
        await self._over(supervisor)
        self._raise_start_error(supervisor.failures)

    async def stop(self) -> None:
        """Stop every hook, users before what they use. Raises StopError if some failed; all are over then."""
        if self._supervisor is None:
            return
        supervisor = self._supervisor
        supervisor.stop()
        await self._over(supervisor)
        self._supervisor = None
        if failures := supervisor.failures:
            crashed = any(failure.phase is State.STARTED for failure in failures)
            beginning = f"{self.name} {'ended' if crashed else 'did not stop well'}"
            raise StopError(sentence(beginning, failures), [one.error for one in failures])

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Hive"]:
        """The hive, started; stopped at the end of the block.

        The block is cancelled when a hook crashes or a Shutdown is requested with an error, and that raised.
        """
        await self.start()
        try:
            with anyio.CancelScope() as body:
                self._body = body
                yield self
        except BaseException as error:
            try:
                await self.stop()
            except StopError as stop_error:
                error.add_note(str(stop_error))
            raise
        await self.stop()
        if self.shutdown.error is not None:
            raise self.shutdown.error

    async def run(self) -> int:
        """Start, run until a signal or a Shutdown, stop; the exit code. Faults are told on standard error.

        SIGINT and SIGTERM stop in order; a second one ends the process at once. 0 after an ordered stop, 2
        for usage and settings, 1 for anything else.
        """
        from lifecycle.run import run  # signals and garbage collection are for whole processes only

        return await run(self)

    @functools.cached_property
    def _resolution(self) -> Resolution:
        return Resolution(assemble(self._root, self._cells), _INJECTED)

    @functools.cached_property
    def _nested(self) -> list["Hive"]:
        """Hives that may run inside this one, to be checked with it."""
        nodes = [node for node in self._resolution.active if node.kind == "provide"]
        plans = [(node.scope, plan) for node in nodes if (plan := plan_of(node.call)) is not None]
        return [plan.hive(Nesting(self, scope)) for scope, plan in plans]

    def _inner_hives(self) -> list[InnerHive]:
        return [one for one in self._build.instances.values() if isinstance(one, InnerHive)]

    @functools.cached_property
    def _faults(self) -> list[Fault]:
        inside = (fault for inner in self._nested for fault in inner._faults)  # noqa: SLF001  # a hive's own kind
        return [*check(self._resolution), *inside]

    @property
    def _structs(self) -> list[type[Settings]]:
        inside = (struct for inner in self._nested for struct in inner._structs)  # noqa: SLF001
        return [*self._own_structs, *inside]

    @property
    def _own_structs(self) -> list[type[Settings]]:
        nodes = (node for node in self._resolution.active if node.kind == "config" and not node.faults)
        return [node.call for node in nodes]  # type: ignore[misc]  # a config node holds its struct

    @functools.cached_property
    def _loaded(self) -> Loaded:
        return self._load()

    def _load(self, config_dirs: Sequence[Path] = ()) -> Loaded:
        return load(dict.fromkeys(self._structs), self._sources, config_dirs)

    @functools.cached_property
    def _build(self) -> Build:
        return Build(self._resolution, self._loaded.structs, self._inject, self.profile)

    def _construct(self) -> Build:
        self.check()
        if self._supervisor is None:  # when it runs, what is to be there is there
            self._build.construct()
        return self._build

    def _built(self) -> list[object]:
        if "_build" not in self.__dict__:
            return []
        running = (inner.current for inner in self._inner_hives() if inner.current is not None)
        inside = (one for hive in running for one in hive._built())  # noqa: SLF001
        return [*self._build.instances.values(), *inside]

    def _inject(self, key: Key, node: Constructor) -> object:
        return _INJECTED[key](self, node)

    def _lifecycle(self, node: Constructor) -> Lifecycle:
        return self._lifecycles.setdefault(node, Lifecycle(node.name))

    def _jobs_of(self, node: Constructor) -> Jobs:
        if node not in self._jobs:
            module = node.scope.id
            health, log = Health(self.health, module), self._logger(node)
            self._jobs[node] = Jobs(
                node.name, health, log, self.shutdown, Backoff(), metrics=self.jobs, module=module
            )
        return self._jobs[node]

    def _logger(self, node: Constructor) -> Logger:
        return logger_for(node.scope.id, self._base_log)

    def _hooks(self, build: Build) -> list[HookNode]:
        """One node per hook that is new, in the order of construction, each with what it waits for."""
        return self._wiring.add(build.instances, self._lifecycles, self._jobs)

    def _on_crash(self, failure: HookFailure) -> None:
        self.log.error("hook crashed", hook=failure.node.name, of=failure.node.module, exc_info=failure.error)
        if self._body is not None:
            self._body.cancel()
        elif self._supervisor is not None and self._supervisor.first.started:
            self.shutdown.request(failure.error)

    def _on_shutdown(self) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            return
        if not supervisor.first.started:
            supervisor.stop()
        elif self.shutdown.error is not None and self._body is not None:
            self._body.cancel()

    async def _over(self, supervisor: Supervisor) -> None:
        """Until every hook is over or left behind, whatever is cancelled meanwhile."""
        assert self._supervision is not None  # noqa: S101  # only called once started
        with anyio.CancelScope(shield=True), awaiting(supervisor.pending):
            await supervisor.over.wait()
            self.left_behind = [str(node) for node in supervisor.left]
            if not supervisor.left:
                await asyncio.wait({self._supervision})
                self._supervision.result()

    def _raise_start_error(self, failures: list[HookFailure]) -> None:
        errors, told = [failure.error for failure in failures], [str(failure) for failure in failures]
        if not errors:
            asked = self.shutdown.error
            errors = [
                asked if isinstance(asked, Exception) else ShutdownRequestedError("asked to end meanwhile")
            ]
            told = [str(errors[0])]
        raise StartError(sentence(f"{self.name} did not start", told), errors) from errors[0]


_INJECTED: dict[Key, Callable[[Hive, Constructor], object]] = {
    Lifecycle: Hive._lifecycle,  # noqa: SLF001  # this is the hive's own table
    Jobs: Hive._jobs_of,  # noqa: SLF001
    Health: lambda hive, node: hive.health.reporter(node.scope.id),
    HealthTree: lambda hive, _: hive.health,
    JobMetrics: lambda hive, _: hive.jobs,
    HiveView: lambda hive, _: HiveView(hive.graph, hive.profile, hive._loaded, hive._load),  # noqa: SLF001
    Logger: Hive._logger,  # noqa: SLF001
    Modules: lambda hive, _: hive.modules,
    Nesting: lambda hive, node: Nesting(hive, node.scope),
    Profile: lambda hive, _: hive.profile,
    Shutdown: lambda hive, _: hive.shutdown,
    Tables: lambda hive, _: hive.tables,
}
