"""The hive: cells, checked, built, started and stopped."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio

from lifecycle.errors import (
    BuildError,
    HiveError,
    NotStartedError,
    ShutdownRequestedError,
    StartError,
    StopError,
    as_failure,
)
from lifecycle.hints.keys import Key, is_member, plain, type_name, wanted
from lifecycle.hints.places import caller
from lifecycle.hive.composition import Composition
from lifecycle.hive.nesting import Holder, Nesting
from lifecycle.hive.reload import Reload
from lifecycle.hive.switch import Modules, Site, find_scope
from lifecycle.hive.view import HiveView
from lifecycle.hive.wiring import Wiring
from lifecycle.hooks.checks import check_seconds
from lifecycle.hooks.events import Events
from lifecycle.hooks.hooks import Lifecycle
from lifecycle.hooks.nodes import HookFailure, HookNode, State, sentence
from lifecycle.hooks.pending import awaiting
from lifecycle.hooks.phase import Phase
from lifecycle.hooks.shutdown import Shutdown
from lifecycle.hooks.spans import Spans, in_force
from lifecycle.hooks.supervisor import (
    DEFAULT_START_TIMEOUT,
    DEFAULT_STOP_BUDGET,
    DEFAULT_STOP_TIMEOUT,
    Supervisor,
)
from lifecycle.injection.cells import Cell
from lifecycle.injection.constructors import Constructor, ModuleId
from lifecycle.injection.profile import Profile
from lifecycle.jobs.job import Backoff
from lifecycle.jobs.jobs import Jobs
from lifecycle.jobs.metrics import JobMetrics
from lifecycle.process.health import Health, HealthTree
from lifecycle.process.logs import Logger, logger_for
from lifecycle.process.loop_faults import LoopFaults
from lifecycle.settings.sources import Loaded, Sources
from lifecycle.tables.registry import Tables

if TYPE_CHECKING:
    from dependency_injector.providers import Provider

    from lifecycle.graph.value import Graph
    from lifecycle.injection.build import Build

__all__ = ["Hive"]

DEFAULT_SLOW_HOOK = 1.0

T = TypeVar("T")


class Hive(Composition):
    """Cells that run together. A hive starts once.

    `settings` are Sources, or for tests a mapping from option names (kebab-case) to values. `sequential`
    starts one hook after the other, in a fixed order, instead of siblings at the same time. Environment
    variables begin with `env_prefix`; by default the name in upper case, HEART_ for heart. The time-outs,
    in seconds, are those of hooks that name none; the stop budget is for all stops together: after it hooks
    are cancelled, and those that run on (a worker thread cannot be cancelled) are named and left behind.
    Starts and stops of hooks are logged with what they took: at level debug, and those that take `slow_hook`
    seconds or more at level info.
    """

    def __init__(
        self,
        *cells: Cell,
        settings: Sources | Mapping[str, object] | None = None,
        name: str = "hive",
        env_prefix: str | None = None,
        log: Logger | None = None,
        sequential: bool = False,
        start_timeout: float = DEFAULT_START_TIMEOUT,
        stop_timeout: float = DEFAULT_STOP_TIMEOUT,
        stop_budget: float = DEFAULT_STOP_BUDGET,
        slow_hook: float = DEFAULT_SLOW_HOOK,
        refuse_circles: bool = False,
    ) -> None:
        place = caller()
        for what, limit in (
            ("start_timeout", start_timeout),
            ("stop_timeout", stop_timeout),
            ("stop_budget", stop_budget),
        ):
            check_seconds(limit, f"{what} of {name}", place)
        check_seconds(slow_hook, f"slow_hook of {name}", place, zero=True)
        super().__init__(name, cells, settings, env_prefix, place, refuse_circles=refuse_circles)
        self.profile = Profile()
        """How long every constructor and hook took."""
        self.health = HealthTree()
        self.jobs = JobMetrics()
        """Runs, failures and durations of every job."""
        self.phase = Phase()
        """Whether it starts, runs or stops."""
        self.shutdown = Shutdown()
        self.spans = Spans()
        """Who traces it."""
        self.tables = Tables(self._built)
        """Every table, by name."""
        self.log = logger_for(name, log)
        self._base_log = log
        self._sequential = sequential
        self._limits = (start_timeout, stop_timeout)
        self._stop_budget = stop_budget
        self.events = Events(self.log, slow_hook)
        """Events of hooks, jobs and modules, for subscribers."""
        self.modules = Modules(name, self.health, self.events)
        """Switches modules off and on."""
        self.reload = Reload(
            name, self.modules, lambda: self._resolution, lambda: self._loaded, self._load, self._take
        )
        """Reloads settings, and restarts modules with changed ones."""
        self._wiring = Wiring((start_timeout, stop_timeout), sequential=sequential)
        self._lifecycles: dict[Constructor, Lifecycle] = {}
        self._found: dict[object, object] = {}
        """What get() has found by a type alone, where nothing else provides that."""
        self._jobs: dict[Constructor, Jobs] = {}
        self.left_behind: list[str] = []
        """Hooks that ran on, cancelled as they were, when the hive had stopped."""
        self._build_failure: BuildError | None = None
        self._supervisor: Supervisor | None = None
        self._loop_faults: LoopFaults | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._body: anyio.CancelScope | None = None

    def graph(self, *, faulty: bool = False) -> "Graph":
        """The graph as a value. Builds the objects, which is pure, to know the hooks; starts nothing.

        Required settings without a value are shown as unset; what needs them is not built, so that its
        hooks are not in the graph. Raises what check() raises for other faults, and BuildError. With `faulty`
        a graph with faults is drawn as well, unbuilt and so without hooks; they are in its `faults`.
        """
        from lifecycle.graph.graft import grafted
        from lifecycle.graph.value import faulty_graph, graph_of  # who only runs a hive never asks

        if faulty and self._faults:
            own = {group for _, group in self._own_groups}
            known = [one for one in self._loaded.settings if one.option.group in own]
            return faulty_graph(self._resolution, self._faults, known)
        build = self._construct(unset=True)
        hooks = Wiring(self._limits, sequential=self._sequential).add(
            build.instances, self._lifecycles, self._jobs
        )
        own = {group for _, group in self._own_groups}
        settings = [one for one in self._loaded.settings if one.option.group in own]
        graph = graph_of(self._resolution, build, hooks, settings, self._without_settings())
        for inner in self._holders():
            graph = grafted(graph, inner.graph())
        return graph

    @overload
    def get(self, kind: type[T], module: str | None = None) -> T: ...
    @overload
    def get(self, kind: Callable[..., T], module: str | None = None) -> T: ...  # a Protocol or a NewType
    @overload
    def get(self, kind: object, module: str | None = None) -> Any: ...  # Annotated with a name
    def get(self, kind: object, module: str | None = None) -> object:
        """What the graph holds for a type, private ones too when there is only one. Builds nothing.

        With the full id of a `module` it is what that module sees of it. ``list[Member[T]]`` is every member
        that was built. What is decorated in a part of the hive only is given as it is, what is decorated in
        all of it with the decoration.

        Raises NotStartedError when it was not built: the hive has not started, or nothing invoked needs it.
        """
        if module is None:
            try:
                return self._found[kind]
            except KeyError:
                pass
        if (own := _OF_THE_HIVE.get(kind)) is not None:
            return getattr(self, own)
        asked = wanted(kind)
        found = self._providing(asked.key, module)
        built = self._build.instances if "_build" in self.__dict__ else {}
        held = [node for node in found if node in built]
        if asked.collect is not None and built and (held or not found):
            grouped = len(held) != 1 or is_member(held[0].key)
            return asked.collect([built[node] for node in held] if grouped else built[held[0]])
        if len(held) == 1:
            if module is None and len(found) == 1:  # there is no other to choose from, ever
                self._found[kind] = built[held[0]]
            return built[held[0]]
        name = type_name(kind)
        self._choose("get", name, held, found)
        raise NotStartedError(self._why_unbuilt(name, found))

    def provider(self, kind: object, module: str | None = None) -> "Provider[Any]":
        """dependency-injector's provider of a type, for the library's own tooling; `module` is as for get().

        What is constructed from then on gets what overrides it: in a hive that runs, modules that are enabled
        again. Raises what check() raises, HiveError when nothing provides the type, or several do privately.
        """
        self.check()
        found = self._providing(wanted(kind).key, module)
        self._choose("provider", type_name(kind), found, found)
        return self._build.providers[found[0]]

    def _providing(self, key: Key, module: str | None) -> Sequence[Constructor]:
        scope = None if module is None else find_scope(self._resolution.assembly.scopes, module, self.name)
        return self._resolution.held(key, scope)

    def _choose(
        self, method: str, name: str, among: Sequence[Constructor], found: Sequence[Constructor]
    ) -> None:
        """Raise HiveError where there is none, or more than one to choose from."""
        if len(among) > 1:
            raise HiveError(
                f"{name} is provided privately by {' and by '.join(map(str, among))}: {method}() "
                f"cannot choose; say of which module, as in {method}({name}, module={among[0].scope.id!r})"
            )
        if not found:
            raise HiveError(f"nothing in {self.name} provides {name}")

    def _why_unbuilt(self, name: str, found: Sequence[Constructor]) -> str:
        """Why none of the constructors that provide it has an instance."""
        if self._build_failure is not None:
            return f"{name} was not built, {self.name} could not be: {self._build_failure}"
        if (module := next(filter(None, map(self.modules.why_down, found)), None)) is not None:
            return f"{name} is not there: module {module} is disabled"
        if self._supervision is None and ("_build" not in self.__dict__ or not self._build.instances):
            return f"{name} does not exist yet: {self.name} has not started"
        return f"{name} was not built: nothing invoked needs it; add invoke({name})"

    def build(self) -> None:
        """Build every object that something invoked needs, as a start does first; starts nothing.

        So get() gives them, and a test may fill a table before. Raises what check() raises, BuildError.
        """
        self._construct()

    def key_of(self, instance: object) -> Key | None:
        """The key under which the graph holds an instance, as written in hints; None if it holds no such
        instance."""
        built = self._build.instances.items() if "_build" in self.__dict__ else ()
        return next((plain(node.key) for node, one in built if one is instance), None)

    async def start(self) -> None:
        """Build everything and start every hook.

        When one fails or is overdue, or this is cancelled, every hook that had started is stopped again.
        Raises what check() raises, BuildError, StartError.
        """
        if self._supervision is not None:
            raise RuntimeError(f"{self.name} was started before: a hive starts once")
        on_asyncio(self.name)
        build = self._construct()
        for warning in self._loaded.warnings:
            self.log.warning(warning)
        for lifecycle in self._lifecycles.values():
            lifecycle.seal()
        supervisor = Supervisor(
            self._hooks(build),
            profile=self.profile,
            log=self.log,
            events=self.events,
            phase=self.phase,
            on_crash=self._on_crash,
            stop_budget=self._stop_budget,
        )
        self._supervisor = supervisor
        self._loop_faults = LoopFaults(self.health, self.name, self.log)
        self._loop_faults.install(asyncio.get_running_loop())
        site = Site(build, self._wiring, self._lifecycles, self._jobs, self._hooks, self.profile)
        self.modules.open(self._resolution, site, supervisor)
        self.shutdown.listen(self._on_shutdown)
        # a task of its own, so that no cancel scope around the caller reaches it
        around = in_force.set(in_force.get() if self.spans.opener is None else self.spans)
        self._supervision = asyncio.create_task(supervisor.run(), name=f"{self.name}: hooks")
        in_force.reset(around)
        self._supervision.add_done_callback(lambda _: supervisor.abandon())
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
        """Stop every hook, users before what they use. Raises StopError if some failed; all are over then.

        A run() of this hive ends with it. Who is cancelled meanwhile still waits for all. Raises HiveError in
        a hook or a job of this hive.
        """
        if self._supervisor is None:
            return
        supervisor = self._supervisor
        if (node := supervisor.hook_around()) is not None:
            raise HiveError(
                f"{self.name}: stop() was called in {node}, which it would wait for; "
                "a hook or job ends its hive with Shutdown.request()"
            )
        supervisor.stop()
        self.shutdown.request()
        cancelled = await self._over(supervisor)
        self._supervisor = None
        if failures := supervisor.failures:
            crashed = any(failure.phase is State.STARTED for failure in failures)
            beginning = f"{self.name} {'ended' if crashed else 'did not stop well'}"
            raise StopError(sentence(beginning, failures), [one.error for one in failures]) from cancelled
        if cancelled is not None:
            raise cancelled

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Hive"]:
        """The hive, started; stopped at the end of the block.

        The block is cancelled when a hook crashes or a Shutdown is requested with an error, and that raised.
        """
        await self.start()
        try:
            with anyio.CancelScope() as body:
                self._body = body
                self._on_shutdown()  # someone may have asked a moment ago
                yield self
        except BaseException as error:
            await self._stop_after(error)
            raise
        if (asked := self.shutdown.error) is not None:
            await self._stop_after(asked)
            raise asked
        await self.stop()
        if self.shutdown.error is not None:  # asked meanwhile
            raise self.shutdown.error

    async def _stop_after(self, error: BaseException) -> None:
        """Stop because of an error, which is raised afterwards; failures of the stop are added to it as a
        note. A cancellation shows no notes: after one they are raised instead."""
        try:
            await self.stop()
        except StopError as stop_error:
            if isinstance(error, asyncio.CancelledError):
                raise
            error.add_note(str(stop_error))

    async def run(self) -> int:
        """Start, run until a signal or a Shutdown, stop; the exit code. Faults are printed on standard error.

        SIGINT, SIGTERM and SIGHUP stop in order; a second one ends the process at once. 0 after an ordered
        stop, 2 for usage and settings, what a hook or job gave to sys.exit(), 1 for anything else. Raises
        RuntimeError outside the main thread: signals are handled there only.
        """
        from lifecycle.hive.run import run  # signals and garbage collection are for whole processes only

        on_asyncio(self.name)
        return await run(self)

    async def run_to_the_end(self) -> int:
        """As run(), in a process that ends with the hive: late signals and threads do not keep it.

        From the return on, a signal ends the process at once with the exit code, and so does time, after a
        few seconds; threads that still run are named.
        """
        from lifecycle.hive.signals import bound_end, signals

        on_asyncio(self.name)
        code = 1
        with signals(self.name, lambda _: None):  # until bound_end(): no signal finds them as before any hive
            try:
                code = await self.run()
            finally:
                bound_end(self.name, code)
        return code

    def _holders(self) -> list[Holder]:
        return [one for one in self._build.instances.values() if isinstance(one, Holder)]

    @functools.cached_property
    def _build(self) -> "Build":
        from lifecycle.injection.build import Build  # its library, which a checked graph alone does not need

        return Build(self._resolution, self._loaded.filled, self._inject, self.profile, self._found.clear)

    def _take(self, loaded: Loaded) -> None:
        """Put settings in force, for what is constructed from now on."""
        self.__dict__["_loaded"] = loaded
        self._build.take(loaded.filled)

    def _construct(self, *, unset: bool = False) -> "Build":
        """Build what there is to build; where required settings may be `unset`, not what needs them."""
        self._check(unset=unset)
        if self._supervisor is None:  # when it runs, what is to be there is there
            try:
                self._build.construct(self._without_settings())
            except BuildError as error:
                self._build_failure = error
                raise
        return self._build

    def _built(self) -> list[object]:
        if "_build" not in self.__dict__:
            return []
        inside = (one for inner in self._holders() for one in inner.built())
        return [*self._build.instances.values(), *inside]

    def _injectable(self) -> Collection[Key]:
        return _INJECTED.keys()

    def _inject(self, key: Key, node: Constructor) -> object:
        return _INJECTED[key](self, node)

    def _lifecycle(self, node: Constructor) -> Lifecycle:
        return self._lifecycles.setdefault(node, Lifecycle(node.name))

    def _jobs_of(self, node: Constructor) -> Jobs:
        if node not in self._jobs:
            module = node.scope.id
            health, log = Health(self.health, module), self._logger(node)
            self._jobs[node] = Jobs(
                node.name,
                health,
                log,
                self.shutdown,
                Backoff(),
                metrics=self.jobs,
                module=module,
                events=self.events,
            )
        return self._jobs[node]

    def _logger(self, node: Constructor) -> Logger:
        return logger_for(node.scope.id, self._base_log)

    def _nesting(self, node: Constructor) -> Nesting:
        return Nesting(
            node.scope,
            self._limits,
            self._stop_budget,
            self._base_log,
            self._sequential,
            self.profile,
            self.health,
            self.jobs,
            self.events,
            lambda: self._loaded,
            self._load,
        )

    def _hooks(self, build: "Build") -> list[HookNode]:
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

    async def _over(self, supervisor: Supervisor) -> asyncio.CancelledError | None:
        """Until every hook is over or left behind, whatever is cancelled meanwhile: that is returned."""
        assert self._supervision is not None  # noqa: S101  # only called once started
        cancelled = None
        with anyio.CancelScope(shield=True), awaiting(supervisor.pending):
            while not (supervisor.over.is_set() and (supervisor.left or self._supervision.done())):
                try:
                    await supervisor.over.wait()
                    if not supervisor.left:
                        await asyncio.wait({self._supervision})
                except asyncio.CancelledError as error:  # a shield keeps off scopes, not Task.cancel()
                    cancelled = error
            self.left_behind = [str(node) for node in supervisor.left]
            if self._loop_faults is not None:
                self._loop_faults.remove()
            if not supervisor.left and not self._supervision.cancelled():
                self._supervision.result()
        return cancelled

    def _raise_start_error(self, failures: list[HookFailure]) -> None:
        errors, texts = [failure.error for failure in failures], [str(failure) for failure in failures]
        if not errors:
            asked = self.shutdown.error
            asked = asked or ShutdownRequestedError("asked to end meanwhile")
            errors = [as_failure(asked, self.name)]
            texts = [str(errors[0])]
        raise StartError(sentence(f"{self.name} did not start", texts), errors) from errors[0]


def on_asyncio(name: str) -> None:
    """Raise RuntimeError in any other kind of event loop; loops that asyncio runs, such as uvloop's, are."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(f"{name}: a hive runs on asyncio: anyio.run(..., backend='asyncio')") from None


_INJECTED: dict[Key, Callable[[Hive, Constructor], object]] = {
    Events: lambda hive, _: hive.events,
    Lifecycle: Hive._lifecycle,  # noqa: SLF001  # this is the hive's own table
    Jobs: Hive._jobs_of,  # noqa: SLF001
    Health: lambda hive, node: hive.health.reporter(node.scope.id),
    HealthTree: lambda hive, _: hive.health,
    JobMetrics: lambda hive, _: hive.jobs,
    HiveView: lambda hive, _: HiveView(hive.graph, hive.profile, lambda: hive._loaded, hive._load),  # noqa: SLF001
    Logger: Hive._logger,  # noqa: SLF001
    ModuleId: lambda _, node: node.scope.id,
    Modules: lambda hive, _: hive.modules,
    Nesting: Hive._nesting,  # noqa: SLF001
    Phase: lambda hive, _: hive.phase,
    Profile: lambda hive, _: hive.profile,
    Reload: lambda hive, _: hive.reload,
    Shutdown: lambda hive, _: hive.shutdown,
    Spans: lambda hive, _: hive.spans,
    Tables: lambda hive, _: hive.tables,
}

_OF_THE_HIVE: dict[object, str] = {
    Events: "events",
    HealthTree: "health",
    JobMetrics: "jobs",
    Modules: "modules",
    Phase: "phase",
    Reload: "reload",
    Shutdown: "shutdown",
    Tables: "tables",
}
"""What get() gives that no constructor makes: by type the attribute."""
