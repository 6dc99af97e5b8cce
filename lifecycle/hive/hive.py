"""The hive: checks, builds, starts and stops cells."""

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
from lifecycle.hints.keys import Key, is_member, parse_hint, plain, type_name
from lifecycle.hints.places import caller
from lifecycle.hive.composition import Composition
from lifecycle.hive.nesting import Holder, Nesting
from lifecycle.hive.reload import Reload
from lifecycle.hive.switch import Instances, Modules, find_scope
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

    `settings` are Sources or, for tests, a mapping from option names (kebab-case) to values. `sequential`
    starts hooks one after the other in a fixed order, instead of independent ones in parallel. Environment
    variables begin with `env_prefix`, by default the name in upper case: HEART_ for heart. The timeouts, in
    seconds, apply to hooks without their own; the stop budget applies to the whole stop: when it is used up,
    hooks are cancelled, and those that still run (a worker thread cannot be cancelled) are named and left
    behind. Starts and stops of hooks are logged with their durations: at level debug, and from `slow_hook`
    seconds on at level info.
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
        for parameter, limit in (
            ("start_timeout", start_timeout),
            ("stop_timeout", stop_timeout),
            ("stop_budget", stop_budget),
        ):
            check_seconds(limit, f"{parameter} of {name}", place)
        check_seconds(slow_hook, f"slow_hook of {name}", place, zero=True)
        super().__init__(name, cells, settings, env_prefix, place, refuse_circles=refuse_circles)
        self.profile = Profile()
        """Durations of every constructor and hook."""
        self.health = HealthTree()
        self.jobs = JobMetrics()
        """Runs, failures and durations of every job."""
        self.phase = Phase()
        """Whether the hive starts, runs or stops."""
        self.shutdown = Shutdown()
        self.spans = Spans()
        """Tracers of starts and stops."""
        self.tables = Tables(self._built)
        """All tables, by name."""
        self.log = logger_for(name, log)
        self._base_log = log
        self._sequential = sequential
        self._limits = (start_timeout, stop_timeout)
        self._stop_budget = stop_budget
        self.events = Events(self.log, slow_hook)
        """Events of hooks, jobs and modules, for subscribers."""
        self.modules = Modules(name, self.health, self.events)
        """Disables and enables modules."""
        self.reload = Reload(
            name, self.modules, lambda: self._resolution, lambda: self._loaded, self._load, self._take
        )
        """Reads settings again and restarts modules with changed ones."""
        self._wiring = Wiring((start_timeout, stop_timeout), sequential=sequential)
        self._lifecycles: dict[Constructor, Lifecycle] = {}
        self._by_type: dict[object, object] = {}
        """Results of get() by type alone, for types that only one constructor provides."""
        self._jobs: dict[Constructor, Jobs] = {}
        self.left_behind: list[str] = []
        """Hooks that still ran when the hive had stopped, although they were cancelled."""
        self._build_failure: BuildError | None = None
        self._supervisor: Supervisor | None = None
        self._loop_faults: LoopFaults | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._body: anyio.CancelScope | None = None

    def graph(self, *, faulty: bool = False) -> "Graph":
        """Return the graph as a value.

        Builds the objects, which has no side effects, to include hooks; starts nothing.

        Required settings without a value are shown as unset; what needs them is not built, so its hooks are
        missing. Raises what check() raises for other faults, and BuildError. With `faulty`, a graph with
        faults is returned, too, unbuilt and so without hooks; its `faults` lists them.
        """
        from lifecycle.graph.inner_graph import with_inner_graph
        from lifecycle.graph.value import faulty_graph, graph_of  # not imported to run a hive

        if faulty and self._faults:
            own = {group for _, group in self._own_groups}
            settings = [setting for setting in self._loaded.settings if setting.option.group in own]
            return faulty_graph(self._resolution, self._faults, settings)
        build = self._construct(unset=True)
        hooks = Wiring(self._limits, sequential=self._sequential).add(
            build.instances, self._lifecycles, self._jobs
        )
        own = {group for _, group in self._own_groups}
        settings = [setting for setting in self._loaded.settings if setting.option.group in own]
        graph = graph_of(self._resolution, build, hooks, settings, self._without_settings())
        for inner in self._holders():
            graph = with_inner_graph(graph, inner.graph())
        return graph

    @overload
    def get(self, kind: type[T], module: str | None = None) -> T: ...
    @overload
    def get(self, kind: Callable[..., T], module: str | None = None) -> T: ...  # a Protocol or a NewType
    @overload
    def get(self, kind: object, module: str | None = None) -> Any: ...  # Annotated with a name
    def get(self, kind: object, module: str | None = None) -> object:
        """Return the instance of a type, also of a private one if only one constructor provides it.

        Builds nothing.

        With the full id of a `module`, the instance that this module receives. ``list[Member[T]]`` returns
        all members that are built. A type that is decorated in a part of the hive is returned undecorated,
        one that is decorated in the whole hive is returned decorated.

        Raises NotStartedError if it is not built: the hive has not started, or nothing that is invoked needs
        it.
        """
        if module is None:
            try:
                return self._by_type[kind]
            except KeyError:
                pass
        if (own := _OF_THE_HIVE.get(kind)) is not None:
            return getattr(self, own)
        request = parse_hint(kind)
        providers = self._providing(request.key, module)
        built = self._build.instances if "_build" in self.__dict__ else {}
        instantiated = [node for node in providers if node in built]
        if request.collect is not None and built and (instantiated or not providers):
            grouped = len(instantiated) != 1 or is_member(instantiated[0].key)
            return request.collect(
                [built[node] for node in instantiated] if grouped else built[instantiated[0]]
            )
        if len(instantiated) == 1:
            if module is None and len(providers) == 1:  # unambiguous for the lifetime of the hive
                self._by_type[kind] = built[instantiated[0]]
            return built[instantiated[0]]
        name = type_name(kind)
        self._choose("get", name, instantiated, providers)
        raise NotStartedError(self._why_unbuilt(name, providers))

    def provider(self, kind: object, module: str | None = None) -> "Provider[Any]":
        """Return the provider object of dependency-injector for a type, for that library's tooling.

        `module` as in get().

        Overriding it affects later constructions: in a running hive, modules that are enabled again. Raises
        what check() raises, HiveError if nothing provides the type or several constructors do so privately.
        """
        self.check()
        providers = self._providing(parse_hint(kind).key, module)
        self._choose("provider", type_name(kind), providers, providers)
        return self._build.providers[providers[0]]

    def _providing(self, key: Key, module: str | None) -> Sequence[Constructor]:
        scope = None if module is None else find_scope(self._resolution.assembly.scopes, module, self.name)
        return self._resolution.held(key, scope)

    def _choose(
        self, method: str, name: str, among: Sequence[Constructor], providers: Sequence[Constructor]
    ) -> None:
        """Raise HiveError if no constructor or more than one provides a type."""
        if len(among) > 1:
            raise HiveError(
                f"{name} is provided privately by {' and by '.join(map(str, among))}: {method}() "
                f"cannot choose; say of which module, as in {method}({name}, module={among[0].scope.id!r})"
            )
        if not providers:
            raise HiveError(f"nothing in {self.name} provides {name}")

    def _why_unbuilt(self, name: str, providers: Sequence[Constructor]) -> str:
        """Why none of the constructors of a type has an instance."""
        if self._build_failure is not None:
            return f"{name} was not built, {self.name} could not be: {self._build_failure}"
        if (module := next(filter(None, map(self.modules.why_down, providers)), None)) is not None:
            return f"{name} is not there: module {module} is disabled"
        if self._supervision is None and ("_build" not in self.__dict__ or not self._build.instances):
            return f"{name} does not exist yet: {self.name} has not started"
        return f"{name} was not built: nothing invoked needs it; add invoke({name})"

    def build(self) -> None:
        """Build every object that something invoked needs, as a start does first; starts nothing.

        Afterwards, get() returns them, and a test may fill tables before the start. Raises what check()
        raises, BuildError.
        """
        self._construct()

    def key_of(self, instance: object) -> Key | None:
        """Return the key of an instance, as written in hints.

        None if the graph does not hold the instance.
        """
        built = self._build.instances.items() if "_build" in self.__dict__ else ()
        return next((plain(node.key) for node, value in built if value is instance), None)

    async def start(self) -> None:
        """Build everything and start every hook.

        If a hook fails or exceeds its timeout, or this call is cancelled, the started hooks are stopped
        again. Raises what check() raises, BuildError, StartError.
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
        instances = Instances(build, self._wiring, self._lifecycles, self._jobs, self._hooks, self.profile)
        self.modules.open(self._resolution, instances, supervisor)
        self.shutdown.listen(self._on_shutdown)
        # a separate task: cancel scopes of the caller do not reach it
        around = in_force.set(in_force.get() if self.spans.opener is None else self.spans)
        self._supervision = asyncio.create_task(supervisor.run(), name=f"{self.name}: hooks")
        in_force.reset(around)
        self._supervision.add_done_callback(lambda _: supervisor.abandon())
        try:
            with awaiting(supervisor.pending):
                await supervisor.first.finished.wait()
        except BaseException:
            supervisor.stop()
            await self._over(supervisor)
            raise
        if not supervisor.stopping:
            return
        await self._over(supervisor)
        self._raise_start_error(supervisor.failures)

    async def stop(self) -> None:
        """Stop every hook before the hooks that it depends on. Raises StopError if some failed; all have
        ended then.

        A run() of this hive returns afterwards. A cancelled caller still waits for all hooks. Raises
        HiveError if called in a hook or a job of this hive.
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
            raise StopError(
                sentence(beginning, failures), [failure.error for failure in failures]
            ) from cancelled
        if cancelled is not None:
            raise cancelled

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Hive"]:
        """The hive, started; stopped at the end of the block.

        If a hook crashes, or Shutdown is requested with an error, the block is cancelled and the error
        raised.
        """
        await self.start()
        try:
            with anyio.CancelScope() as body:
                self._body = body
                self._on_shutdown()  # a request may have preceded this
                yield self
        except BaseException as error:
            await self._stop_after(error)
            raise
        if (shutdown_error := self.shutdown.error) is not None:
            await self._stop_after(shutdown_error)
            raise shutdown_error
        await self.stop()
        if self.shutdown.error is not None:  # requested meanwhile
            raise self.shutdown.error

    async def _stop_after(self, error: BaseException) -> None:
        """Stop because of an error, which the caller raises afterwards. Failures of the stop become notes on
        it; after a cancellation, which shows no notes, they are raised instead.
        """
        try:
            await self.stop()
        except StopError as stop_error:
            if isinstance(error, asyncio.CancelledError):
                raise
            error.add_note(str(stop_error))

    async def run(self) -> int:
        """Start, run until a signal or a Shutdown, stop. Returns the exit code. Prints faults on standard
        error.

        SIGINT, SIGTERM and SIGHUP stop in order; a second signal ends the process at once. The exit code is 0
        after an ordered stop, 2 for usage and settings, the code that a hook or job passed to sys.exit(),
        otherwise 1. Raises RuntimeError outside the main thread, as only that handles signals.
        """
        from lifecycle.hive.run import run  # only for whole processes, not for hives in tests

        on_asyncio(self.name)
        return await run(self)

    async def run_to_the_end(self) -> int:
        """As run(), for a process that ends with the hive: late signals and threads do not delay its end.

        After the return, a signal ends the process at once with the exit code; after a few seconds it ends
        anyway. Threads that still run are named.
        """
        from lifecycle.hive.signals import bound_end, signals

        on_asyncio(self.name)
        code = 1
        with signals(self.name, lambda _: None):  # until bound_end(): signals are always handled
            try:
                code = await self.run()
            finally:
                bound_end(self.name, code)
        return code

    def _holders(self) -> list[Holder]:
        return [instance for instance in self._build.instances.values() if isinstance(instance, Holder)]

    @functools.cached_property
    def _build(self) -> "Build":
        from lifecycle.injection.build import Build  # not imported to check a graph

        return Build(self._resolution, self._loaded.filled, self._inject, self.profile, self._by_type.clear)

    def _take(self, loaded: Loaded) -> None:
        """Use these settings for later constructions."""
        self.__dict__["_loaded"] = loaded
        self._build.take(loaded.filled)

    def _construct(self, *, unset: bool = False) -> "Build":
        """Build all objects that are not built; with `unset` settings, without their dependents."""
        self._check(unset=unset)
        if self._supervisor is None:  # a running hive is built already
            try:
                self._build.construct(self._without_settings())
            except BuildError as error:
                self._build_failure = error
                raise
        return self._build

    def _built(self) -> list[object]:
        if "_build" not in self.__dict__:
            return []
        inside = (instance for inner in self._holders() for instance in inner.built())
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
        """Return a node for each new hook, in the order of construction, with its dependencies."""
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
        """Wait until every hook has ended or is left behind; return a pending cancellation."""
        assert self._supervision is not None  # noqa: S101  # only called once started
        cancelled = None
        with anyio.CancelScope(shield=True), awaiting(supervisor.pending):
            while not (supervisor.over.is_set() and (supervisor.left or self._supervision.done())):
                try:
                    await supervisor.over.wait()
                    if not supervisor.left:
                        await asyncio.wait({self._supervision})
                except asyncio.CancelledError as error:  # a shield blocks scopes, not Task.cancel()
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
            cause = self.shutdown.error
            cause = cause or ShutdownRequestedError("asked to end meanwhile")
            errors = [as_failure(cause, self.name)]
            texts = [str(errors[0])]
        raise StartError(sentence(f"{self.name} did not start", texts), errors) from errors[0]


def on_asyncio(name: str) -> None:
    """Raise RuntimeError if the running event loop is not asyncio's; loops for asyncio, such as uvloop's, are
    accepted.
    """
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
"""Types that get() returns without a constructor, with the attribute that holds each."""
