"""Construction: one container for each module, one provider for each constructor, dependencies first.

Everything is built in topological order, so no chain recurses, however long. Fakes are overrides, which are
set before anything is built.
"""

import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from lifecycle.errors import BuildError, as_failure, described
from lifecycle.hints.keys import Key, type_name
from lifecycle.injection.constructors import Constructor, Parameter, Part, Scope
from lifecycle.injection.cycles import order
from lifecycle.injection.fakes import value_mismatches
from lifecycle.injection.profile import Profile, Step
from lifecycle.injection.resolve import Resolution
from lifecycle.process.blocked_imports import imports_blocked
from lifecycle.settings.options import Group, Settings

# "pydantic_core", not "pydantic": the library is compiled, see imports_blocked()
with imports_blocked(
    "yaml", "pydantic_core", "pydantic_settings", "fastapi", "fast_depends", "starlette", "werkzeug"
):
    from dependency_injector.containers import DynamicContainer
    from dependency_injector.providers import Callable as CallableProvider
    from dependency_injector.providers import List, Object, Provider, Singleton

__all__ = ["Build"]


class Build:
    """The containers of one hive."""

    def __init__(
        self,
        resolution: Resolution,
        settings: Mapping[Group, Settings],
        inject: Callable[[Key, Constructor], object],
        profile: Profile,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        """`changed` is called when instances are dropped or replaced."""
        self._changed = changed
        self._resolution = resolution
        self._settings = settings
        self._inject = inject
        self._profile = profile
        self.containers: dict[Scope, DynamicContainer] = {
            scope: DynamicContainer() for scope in resolution.assembly.scopes
        }
        self.providers: dict[Constructor, Provider[Any]] = {}
        self.instances: dict[Constructor, object] = {}
        """Instances in the order of construction; invoked functions, too, with their results."""
        for number, node in enumerate(order(resolution.nodes)):
            provider = self._provider(node)
            self.providers[node] = provider
            self.containers[node.scope].set_provider(f"p{number}", provider)

    def construct(self, without: Collection[Constructor] = ()) -> None:
        """Build and call the invoked functions with their dependencies, except `without` and its dependents.

        Raises BuildError. Nothing is built twice.
        """
        for node in self._resolution.order():
            if node not in self.instances and node not in without:
                self.instances[node] = self.providers[node]()

    def take(self, settings: Mapping[Group, Settings]) -> None:
        """Use these values for later constructions."""
        self._changed()
        for node, provider in self.providers.items():
            if node.kind == "config":
                value = settings.get(Group(node.call, node.prefix))  # type: ignore[arg-type]  # its struct
                cast("Object[Any]", provider).set_provides(value)
                if node in self.instances:
                    self.instances[node] = value

    def discard(self, nodes: Iterable[Constructor]) -> None:
        """Drop the instances of these nodes, so that they can be built again."""
        self._changed()
        for node in nodes:
            del self.instances[node]
            provider = self.providers[node]
            if isinstance(provider, Singleton):
                provider.reset()

    def arguments(self, node: Constructor) -> Iterator[tuple[str, Constructor]]:
        """Return the arguments of a node from its provider: nodes by parameter.

        A group is a parameter with several nodes. Parameters without a constructor (a default, a Lifecycle)
        are left out.
        """
        provider: Any = self.providers[node]
        if node.part is None and node.kind not in {"provide", "decorate", "invoke"}:
            return
        yield from ((name, node.needs[name]) for name in node.needs if name in node.orders)
        names = (
            ["result"]
            if node.part
            else [parameter.name for parameter in node.parameters if parameter.positional]
        )
        for name, value in (*zip(names, provider.args, strict=True), *provider.kwargs.items()):
            pending = [value]
            while pending:
                argument = pending.pop()
                if argument in self._nodes:
                    yield name, self._nodes[argument]
                elif isinstance(argument, List | CallableProvider):
                    pending += reversed(argument.args)

    @functools.cached_property
    def _nodes(self) -> dict[Provider[Any], Constructor]:
        return {provider: node for node, provider in self.providers.items()}

    def _provider(self, node: Constructor) -> Provider[Any]:
        if node.kind == "supply":
            return Object(node.call)
        if node.kind == "config":
            # a required setting without a value: its dependents are never built
            return Object(self._settings.get(Group(node.call, node.prefix)))  # type: ignore[arg-type]  # its struct
        if node.kind == "replace":
            return self._overridden(node)
        if node.part is not None:
            return Singleton(_SelectedResult(node, node.part), self.providers[node.needs["result"]])
        args, kwargs = [], {}
        for parameter in node.parameters:
            if parameter.ordering:
                continue
            value = self._argument(node, parameter)
            if parameter.positional:
                args.append(value or Object(parameter.default))
            elif value is not None:
                kwargs[parameter.name] = value
        kind = CallableProvider if node.kind == "invoke" else Singleton
        return kind(_Call(node, self._profile), *args, **kwargs)

    def _argument(self, node: Constructor, parameter: Parameter) -> Provider[Any] | None:
        """Return the argument for a parameter, or None for its default."""
        value: Provider[Any] | None
        if (need := node.needs.get(parameter.name)) is not None:
            value = self.providers[need]
            if parameter.collect is not None:  # a whole group, decorated or faked
                value = CallableProvider(parameter.collect, value)
        elif parameter.collect is not None and (node.groups[parameter.name] or not parameter.has_default):
            members = (self.providers[member] for member in node.groups[parameter.name])
            value = CallableProvider(parameter.collect, List(*members))
        elif (key := node.injected.get(parameter.name)) is not None:
            value = CallableProvider(functools.partial(self._inject, key, node))
        else:
            value = None if parameter.has_default else Object(None)
        return value

    def _overridden(self, fake: Constructor) -> Provider[Any]:
        replaced = [node for node in self._resolution.by_key[fake.key] if node.replaced]
        provider: Provider[Any] = Singleton(_function(replaced[0] if replaced else fake))
        provider.override(Object(fake.call))
        return provider


def _function(node: Constructor) -> Callable[..., Any]:
    return cast("Callable[..., Any]", node.call) if callable(node.call) else type(node.call)


class _Call:
    """A constructor's function, timed, with errors that name the constructor."""

    __slots__ = ("_node", "_profile")

    def __init__(self, node: Constructor, profile: Profile) -> None:
        self._node = node
        self._profile = profile

    def __call__(self, *args: object, **kwargs: object) -> object:
        node = self._node
        began = time.perf_counter()
        try:
            result: object = node.call(*args, **kwargs)  # type: ignore[operator]  # resolve() checked it
        except BaseException as error:  # noqa: BLE001  # re-raised as BuildError, naming the constructor
            failure = as_failure(error, str(node))
            raise BuildError(f"{node} raised {described(failure)}") from failure
        step: Step = "invoke" if node.kind == "invoke" else "construct"
        self._profile.record(step, node.name, node.scope.id, began)
        if hasattr(type(result), "__await__"):
            if inspect.iscoroutine(result):
                result.close()
            raise BuildError(f"{node} returned something to await: do the work in a hook (Lifecycle.append)")
        if result is None and node.kind != "invoke":
            raise BuildError(f"{node} returned None instead of {node.provides}")
        if node.parts and not _has_parts(result, node.parts):
            raise BuildError(f"{node} returned {_shape(result)} instead of {node.provides}")
        kind = type(result)
        if node.key is not None and kind is not node.call and kind is not node.key:
            _check_type(node, result, node.key)
        return result


class _SelectedResult:
    """Selects one of several results."""

    __slots__ = ("_node", "_part")

    def __init__(self, node: Constructor, part: Part) -> None:
        self._node = node
        self._part = part

    def __call__(self, whole: Any) -> object:
        position = self._part.at
        result: object = whole
        if position is not None:
            result = whole[position] if isinstance(position, int) else getattr(whole, position)
        if result is None or hasattr(type(result), "__await__"):
            actual = "None" if result is None else "something to await"
            raise BuildError(f"{self._node} is {actual} instead of {type_name(self._part.key)}")
        if type(result) is not self._part.key:
            _check_type(self._node, result, self._part.key)
        return result


def _check_type(node: Constructor, result: object, key: Key) -> None:
    """Raise BuildError for a value of the wrong type, which would otherwise fail at its use."""
    if faults := list(value_mismatches(result, key)):
        verb = "is" if node.part is not None else "returned"
        text = f"{node} {verb} {_shape(result)} instead of {type_name(key)}"
        if len(faults) > 1 or not faults[0].startswith("it is of type"):
            text += ": " + "; ".join(faults)
        raise BuildError(text)


def _has_parts(result: object, parts: tuple[Part, ...]) -> bool:
    if isinstance(parts[0].at, int):
        return isinstance(result, tuple) and len(result) == len(parts)
    return all(hasattr(result, str(part.at)) for part in parts)


def _shape(result: object) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} results"
    return f"one {type_name(type(result))}"
