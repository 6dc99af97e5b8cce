"""Constructors: what a function or class needs and gives, read from its type hints.

Needs:  cells.
Gives:  Scope, Parameter, Constructor and describe(), which reads hints and tells every fault in them.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from lifecycle.keys import Key, is_awaitable_hint, is_union, split_optional, type_name
from lifecycle.places import Place, has_place, place_of

__all__ = ["SELF", "Constructor", "Kind", "Parameter", "Scope", "Signature", "describe"]

SELF = "self"
"""The key of `self` in an invoked unbound method, until the graph tells which class provides it."""

Kind = Literal["provide", "supply", "config", "replace", "invoke"]


class Scope(msgspec.Struct, frozen=True, eq=False):
    """A module of the hive; the hive itself is the root."""

    id: str
    title: str
    parent: "Scope | None"
    place: Place

    def is_inside(self, other: "Scope") -> bool:
        """Whether this is `other` or below it."""
        scope: Scope | None = self
        while scope is not None:
            if scope is other:
                return True
            scope = scope.parent
        return False


class Parameter(msgspec.Struct, frozen=True):
    """Something a constructor asks for."""

    name: str
    key: Key
    required: bool = True
    """Without it in the graph: a fault when required; else the default, or None for ``X | None``."""
    default: object = inspect.Parameter.empty
    positional: bool = False


class Signature(msgspec.Struct, frozen=True):
    """What a constructor needs and gives."""

    parameters: tuple[Parameter, ...]
    result: Key | None
    """None for a function that is invoked, and when it could not be read."""
    faults: tuple[str, ...] = ()


class Constructor(msgspec.Struct, eq=False):
    """One node of the graph: something that is called once, or a value that is there already."""

    kind: Kind
    call: object
    """The function or class; the value itself for supply, config (the struct) and replace (the fake)."""
    name: str
    key: Key | None
    scope: Scope
    private: bool = False
    parameters: tuple[Parameter, ...] = ()
    faults: tuple[str, ...] = ()
    needs: "dict[str, Constructor]" = msgspec.field(default_factory=dict)
    """By parameter name; filled when the graph is resolved."""
    injected: dict[str, Key] = msgspec.field(default_factory=dict)
    """Parameters the hive itself fills, bound to this constructor."""
    replaced: bool = False
    cell_place: Place | None = None
    """Where the cell stands that holds a value; functions and classes know their own place."""

    @property
    def place(self) -> Place:
        """Where it is written. Looked up when asked for: it reads the source."""
        return self.cell_place or place_of(self.call)

    def __str__(self) -> str:
        return f"{self.name} ({self.scope.id}) at {self.place}"


def describe(call: Callable[..., object], *, invoked: bool = False) -> Signature:
    """Read the hints of a function or class. An invoked function needs no result."""
    if not has_place(call):
        return Signature((), None, (f"{call!r} is neither a function nor a class",))
    result: Key | None = call if isinstance(call, type) and not invoked else None
    faults = list(_refusals(call))
    try:
        hints = typing.get_type_hints(_function(call), include_extras=True)
        parameters = inspect.signature(call).parameters.values()
    except NameError as error:
        text = f"its type hint names {error.name}, which is not defined where it is written"
        return Signature((), result, (f"{text}: import it outside of `if TYPE_CHECKING`, at module level",))
    except (TypeError, ValueError) as error:
        return Signature((), result, (f"its parameters cannot be read: {error}",))
    found = []
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            faults.append(
                f"{star}{parameter.name} cannot be filled: name each dependency as a parameter of its own"
            )
        elif parameter.name in hints:
            found.append(_parameter(parameter, hints[parameter.name], faults))
        elif invoked and parameter.name == "self" and not found:
            found.append(Parameter("self", SELF, positional=True))
        elif parameter.default is parameter.empty:
            faults.append(f"parameter {parameter.name!r} has no type hint: the hint says what to inject")
    if not isinstance(call, type) and not invoked:
        result = _result(hints, faults)
    return Signature(tuple(found), result, tuple(faults))


def _function(call: Any) -> Callable[..., object]:
    """What carries the hints of the parameters."""
    is_class = isinstance(call, type)
    function: Callable[..., object] = call.__init__ if is_class else call
    return function


def _parameter(parameter: inspect.Parameter, hint: object, faults: list[str]) -> Parameter:
    key, optional = split_optional(hint)
    has_default = parameter.default is not parameter.empty
    if not has_default and is_union(key):
        faults.append(f"parameter {parameter.name!r}: {type_name(key)} is no single type to inject")
    elif not isinstance(key, typing.Hashable):
        faults.append(f"parameter {parameter.name!r}: {type_name(key)} cannot be a key, it is not hashable")
        key = object
    default = parameter.default if has_default else None
    positional = parameter.kind is parameter.POSITIONAL_ONLY
    return Parameter(parameter.name, key, not (has_default or optional), default, positional)


def _refusals(call: Callable[..., object]) -> typing.Iterator[str]:
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        yield "it is async: constructors only build objects; do the work in a hook (Lifecycle.append)"
    elif inspect.isgeneratorfunction(call):
        yield "it is a generator: return the object, and clean up in a hook (Lifecycle.enter)"


def _result(hints: dict[str, object], faults: list[str]) -> Key | None:
    if "return" not in hints:
        faults.append("it has no result type: `-> T` says what it provides")
        return None
    result = hints["return"]
    if result is type(None):
        faults.append("it returns None, so it provides nothing: give a result, or use invoke()")
        return None
    if is_awaitable_hint(result):
        if not any("async" in fault or "generator" in fault for fault in faults):
            faults.append(f"it returns {type_name(result)}: constructors return objects that need no await")
        return None
    if is_union(result) or not isinstance(result, typing.Hashable):
        faults.append(f"it returns {type_name(result)}, which is no single type to provide")
        return None
    return result
