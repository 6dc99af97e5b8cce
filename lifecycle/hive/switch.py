"""Disables and enables modules while the hive runs.

Disabling a module stops, in reverse order, the hooks and jobs of all its instances and of all their
dependents, in any module. The instances are dropped; enabling the module constructs them anew and starts
their hooks in order. Other instances and existing values (settings, supplied values, fakes) are unchanged.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from lifecycle.errors import HiveError, ShutdownRequestedError, StartError, StopError, suggestion
from lifecycle.hive.wiring import Wiring
from lifecycle.hooks.events import Events, ModuleEvent
from lifecycle.hooks.hooks import Lifecycle
from lifecycle.hooks.nodes import HookFailure, HookNode, sentence
from lifecycle.hooks.supervisor import Supervisor
from lifecycle.injection.constructors import Constructor, Scope
from lifecycle.injection.profile import Profile
from lifecycle.injection.resolve import Resolution
from lifecycle.jobs.jobs import Jobs
from lifecycle.process.health import HealthTree
from lifecycle.tables.read_table import ReadTable
from lifecycle.tables.table import sources_return

if TYPE_CHECKING:
    from lifecycle.injection.build import Build

__all__ = ["Instances", "Modules", "find_scope"]

_VALUES = frozenset({"supply", "config", "replace"})


class Instances:
    """The instances of a hive and their hooks, jobs and tables: removes some, and constructs them anew."""

    def __init__(
        self,
        build: "Build",
        wiring: Wiring,
        lifecycles: dict[Constructor, Lifecycle],
        jobs: dict[Constructor, Jobs],
        hooks: "Callable[[Build], list[HookNode]]",
        profile: Profile,
    ) -> None:
        self._build = build
        self._wiring = wiring
        self._lifecycles = lifecycles
        self._jobs = jobs
        self._hooks = hooks
        self._profile = profile

    @property
    def built(self) -> Collection[Constructor]:
        """Whether a constructor has an instance."""
        return self._build.instances

    def remove(self, nodes: Collection[Constructor]) -> list[HookNode]:
        """Drop these instances and their dependents; return their hooks, which still run."""
        hooks = self._wiring.remove(nodes)
        for node in nodes:
            self._lifecycles.pop(node, None)
            if (jobs := self._jobs.pop(node, None)) is not None:
                jobs.forget()
        self._build.discard(nodes)
        return hooks

    def tables(self, nodes: Collection[Constructor]) -> list[ReadTable[Any, Any]]:
        """Return the tables among the instances of these constructors."""
        instances = (self._build.instances.get(node) for node in nodes)
        return [instance for instance in instances if isinstance(instance, ReadTable)]

    def construct(self, fresh: Iterable[Constructor], without: Collection[Constructor]) -> list[HookNode]:
        """Construct what is missing, except disabled nodes; return the hooks to start. Raises BuildError."""
        self._profile.forget({(node.scope.id, node.name) for node in fresh})
        with sources_return():
            self._build.construct(without)
        for lifecycle in self._lifecycles.values():
            lifecycle.seal()
        return self._hooks(self._build)


class Modules:
    """Disables and enables modules, one at a time, while the hive runs."""

    def __init__(self, name: str, health: HealthTree, events: Events) -> None:
        self._name = name
        self._health = health
        self._events = events
        self._resolution: Resolution
        self._instances: Instances
        self._supervisor: Supervisor | None = None
        self._off: dict[str, frozenset[Constructor]] = {}  # module -> what it disabled, in order
        self._busy = ""
        self._ending: Sequence[HookNode] = ()

    def open(self, resolution: Resolution, instances: Instances, supervisor: Supervisor) -> None:
        """Allow switching, as the hive starts."""
        self._resolution, self._instances, self._supervisor = resolution, instances, supervisor

    @property
    def names(self) -> list[str]:
        """All modules, once the hive starts."""
        return [scope.id for scope in self._resolution.assembly.scopes[1:]]

    @property
    def disabled(self) -> list[str]:
        """The disabled modules; not those that stopped as dependents."""
        return list(self._off)

    def affected(self, module: str) -> list[str]:
        """Return the modules in which something stops if this one is disabled, itself first.

        Raises HiveError if there is no such module, or the hive is not running.
        """
        self._running(module)
        down = self._down_with(self._scope(module))
        inside = (node.scope.id for node in self._resolution.order() if node in down)
        return list(dict.fromkeys([module, *inside]))

    async def disable(self, module: str) -> list[str]:
        """Stop the module and its dependents; a no-op if it is disabled. Returns affected().

        Raises HiveError if there is no such module, the hive is not running, or another switch is in
        progress; StopError if hooks failed to stop, but the module is then disabled nevertheless. A job that
        it stops may call it: the caller is cancelled like any job, and the stop continues.
        """
        supervisor = self._begin(module)
        scope = self._scope(module)
        if module in self._off:
            return []
        affected = self.affected(module)
        self._off[module] = self._down_with(scope)
        built = [node for node in self._instances.built if node in self._off[module]]
        tables = self._instances.tables(built)
        hooks = self._instances.remove(built)
        self._report(module, affected)
        failures: list[HookFailure] = []
        self._busy, self._ending = f"{module} is being disabled", hooks
        supervisor.end(hooks, failures)
        for hook in hooks:
            await hook.finished.wait()
        for table in tables:  # watchers without a dependency in the graph
            table.close(f"module {module} was disabled; look it up again once that is enabled")
        self._busy = ""
        self._events.emit(ModuleEvent("disabled", module, tuple(affected)))
        if failures:
            text = sentence(f"{module} did not stop well", failures)
            raise StopError(text, [failure.error for failure in failures])
        return affected

    async def enable(self, module: str) -> list[str]:
        """Construct and start the instances that disable() stopped, unless another disabled module prevents
        it.

        Returns the modules in which something starts; empty if it is enabled. If a hook fails or this is
        cancelled, all that has started is stopped again, the module stays disabled and its health shows the
        reason. Raises HiveError as disable() does, BuildError, StartError.
        """
        supervisor = self._begin(module)
        self._scope(module)
        if module not in self._off:
            return []
        disabled = self._off.pop(module)
        still_down = frozenset().union(*self._off.values())
        fresh = [node for node in self._resolution.order() if node in disabled and node not in still_down]
        affected = list(dict.fromkeys(node.scope.id for node in fresh))
        self._busy, hooks = f"{module} is being enabled", list[HookNode]()
        try:
            self._without_instances(affected)
            hooks = self._instances.construct(fresh, still_down)
            await self._start(module, supervisor, hooks)
        except BaseException as error:
            self._off[module] = disabled
            built = self._instances.built
            self._ending = self._instances.remove([node for node in fresh if node in built])
            self._report(module, affected)
            if isinstance(error, Exception):
                self._health.report(module, "degraded", "disabled: enabling it failed", error)
            raise
        finally:
            self._busy = ""
        self._events.emit(ModuleEvent("enabled", module, tuple(affected)))
        return affected

    def why_down(self, node: Constructor) -> str | None:
        """Return the disabled module because of which a constructor has no instance."""
        return next((module for module, down in self._off.items() if node in down), None)

    async def _start(self, module: str, supervisor: Supervisor, hooks: list[HookNode]) -> None:
        batch = supervisor.start_more(hooks)
        try:
            await batch.finished.wait()
        except BaseException:
            supervisor.end(hooks, batch.failures)
            with anyio.CancelScope(shield=True):
                for hook in hooks:
                    await hook.finished.wait()
            raise
        if batch.started and not supervisor.stopping:
            return
        for hook in hooks:
            await hook.finished.wait()
        failures = batch.failures
        errors = [failure.error for failure in failures] or [ShutdownRequestedError("the hive is stopping")]
        raise StartError(sentence(f"{module} was not enabled", failures or errors), errors) from errors[0]

    def _running(self, module: str) -> Supervisor:
        supervisor = self._supervisor
        if supervisor is None or supervisor.stopping or not supervisor.first.started:
            raise HiveError(f"module {module} cannot be switched: {self._name} is not running")
        return supervisor

    def _begin(self, module: str) -> Supervisor:
        supervisor = self._running(module)
        if self._busy and (not self._ending or not all(hook.finished.is_set() for hook in self._ending)):
            raise HiveError(f"module {module} cannot be switched: {self._busy}")
        self._busy, self._ending = "", ()
        return supervisor

    def _scope(self, module: str) -> Scope:
        scopes = self._resolution.assembly.scopes
        if module == scopes[0].id:
            raise HiveError(f"{module} is the hive itself, which is stopped and not disabled")
        return find_scope(scopes, module, self._name)

    def _down_with(self, scope: Scope) -> frozenset[Constructor]:
        """Return the constructors of a module and its submodules, and their dependents."""
        down: set[Constructor] = set()
        for node in self._resolution.order():  # dependencies first
            inside = node.scope.is_inside(scope) and node.kind not in _VALUES
            if inside or any(need in down for need in node.needs.values()):
                down.add(node)
        return frozenset(down)

    def _report(self, module: str, affected: Iterable[str]) -> None:
        """Report modules without an instance as stopped; others have only lost their jobs."""
        for stopped in self._without_instances(affected):
            self._health.report(
                stopped, "stopped", "disabled" if stopped == module else f"disabled with {module}"
            )

    def _without_instances(self, modules: Iterable[str]) -> list[str]:
        """Return the modules without an instance; their health reports are dropped."""
        alive = {node.scope.id for node in self._instances.built if node.kind not in _VALUES}
        down = [module for module in modules if module not in alive]
        for module in down:
            if not any(running.startswith(f"{module}.") for running in alive):
                self._health.forget(module)
        return down


def find_scope(scopes: Iterable[Scope], module: str, name: str) -> Scope:
    """Return the module with this full id.

    Raises HiveError, with similar ids, if the hive `name` has none.
    """
    by_id = {scope.id: scope for scope in scopes}
    if (scope := by_id.get(module)) is not None:
        return scope
    raise HiveError(f"there is no module {module!r} in {name}{suggestion(module, by_id)}")
