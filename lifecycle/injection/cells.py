"""Cells: the values of which a hive is composed.

A cell is only a declaration. Nothing is inspected or called before a Hive does so.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from lifecycle.hints.keys import Key, key_of, parse_hint
from lifecycle.hints.places import Place, caller
from lifecycle.settings.options import Settings

__all__ = [
    "Cell",
    "config",
    "config_private",
    "decorate",
    "group",
    "invoke",
    "module",
    "provide",
    "provide_private",
    "replace",
    "supply",
]


class Cell(msgspec.Struct, frozen=True, eq=False):
    """A part of a hive. The functions of this module make cells, for module(), group() or Hive()."""

    place: Place


class ModuleCell(Cell, frozen=True, eq=False):
    """A named scope around cells."""

    id: str
    title: str
    cells: tuple[Cell, ...]


class GroupCell(Cell, frozen=True, eq=False):
    """Cells as one, without a scope."""

    cells: tuple[Cell, ...]


class ProvideCell(Cell, frozen=True, eq=False):
    """Constructors of the graph."""

    constructors: tuple[Callable[..., object], ...]
    private: bool
    name: str = ""
    """The name of each result, if any."""
    as_: tuple[object, ...] = ()
    """Further types under which the result of its one constructor is provided."""


class ConfigCell(Cell, frozen=True, eq=False):
    """Settings structs."""

    structs: tuple[type[Settings], ...]
    prefix: str = ""
    private: bool = False


class DecorateCell(Cell, frozen=True, eq=False):
    """A function around values that the cells in it, or without any the whole module, receive."""

    function: Callable[..., object]
    cells: tuple[Cell, ...]


class InvokeCell(Cell, frozen=True, eq=False):
    """Functions to call once: the roots of the construction."""

    functions: tuple[Callable[..., object], ...]


class SupplyCell(Cell, frozen=True, eq=False):
    """An existing value."""

    value: object
    key: Key
    checked: bool = True
    """Whether its type is checked; not for placeholders in a graph that is only shown."""


class ReplaceCell(Cell, frozen=True, eq=False):
    """A value instead of any provider of the key."""

    key: Key
    fake: object


def module(id: str, title: str, *cells: Cell) -> Cell:  # noqa: A002  # the field's word, always positional
    """Cells in a named scope, which has its own logger, health, jobs and private values.

    The id is kebab-case; inside another module, the full id is dotted (``agent.ipam``).
    """
    return ModuleCell(caller(), id, title, cells)


def group(*cells: Cell) -> Cell:
    """Several cells as one, without a scope of their own."""
    return GroupCell(caller(), cells)


def provide(*constructors: Callable[..., object], name: str = "", as_: tuple[Any, ...] = ()) -> Cell:
    """Constructors of values on which every module of the hive may depend.

    A constructor is a class, or a function with a result type. The type hints of its parameters are its
    dependencies. It is called at most once, and only if something invoked needs its result. It must have no
    side effects: it builds objects; work belongs in hooks.

    ``T | None`` and a default apply if nothing provides T; a private provider elsewhere does not count.
    ``Annotated[T, Named("x")]`` is another key than T; ``Member[T]`` contributes to ``list[Member[T]]``. A
    result ``tuple[A, B]``, or a dataclass marked with @results, provides each of its types. With `name`,
    every result is provided under that name, as if its hint were ``Annotated[T, Named(name)]``: for a module
    that a hive contains several times.

    ``provide(Impl, as_=(A, B))`` provides one instance under its own type and under A and B, the types that
    others depend on: Protocols, base classes, ``Member[T]``. The check refuses a class without all of their
    methods.
    """
    return ProvideCell(caller(), constructors, private=False, name=name, as_=as_)


def provide_private(*constructors: Callable[..., object], name: str = "", as_: tuple[Any, ...] = ()) -> Cell:
    """As provide(), but visible only in the enclosing module and the modules inside it."""
    return ProvideCell(caller(), constructors, private=True, name=name, as_=as_)


def config(*structs: type[Settings], prefix: str = "") -> Cell:
    """Settings structs: every field becomes a flag, an environment variable and a config-dir key.

    Constructors depend on the type of the struct and receive it with its values. With a `prefix`, the names
    of its options begin with that and a dash: ``timeout`` with the prefix ``inside`` is ``--inside-timeout``.
    """
    return ConfigCell(caller(), structs, prefix)


def config_private(*structs: type[Settings], prefix: str = "") -> Cell:
    """As config(), but the struct is visible only in the enclosing module and the modules inside it.

    So a hive may contain a module several times with separate settings, each with another prefix.
    """
    return ConfigCell(caller(), structs, prefix, private=True)


def decorate(function: Callable[..., object], *cells: Cell) -> Cell:
    """Pass the values of a type through `function`, for all of `cells` that depend on the type.

    It takes the value and returns the value to use instead (``def traced(client: Client) -> Client``); it may
    have further dependencies. All other cells receive the value undecorated, as does the function.
    Decorations nest, the innermost is applied last. Without cells, it applies to the enclosing module, or
    hive, and all inside it. Values of replace() are not decorated.
    """
    return DecorateCell(caller(), function, cells)


def invoke(*functions: Callable[..., object]) -> Cell:
    """Roots of the construction: each is called once with its dependencies, in the given order.

    Only these and their dependencies are built. An unbound method (``Server.serve``) is called on the Server
    of the graph. A type (``Table[int, Device]``) is only built.
    """
    return InvokeCell(caller(), functions)


def supply(value: object, type: Any = None) -> Cell:  # noqa: A002  # reads as it is meant: supply(x, type=Clock)
    """Provide a value under its own type or under `type`."""
    return SupplyCell(caller(), value, value.__class__ if type is None else key_of(type))


def replace(type: Any, fake: object) -> Cell:  # noqa: A002  # the type to replace
    """Use `fake` for `type` everywhere, whether or not something provides it: for tests.

    The constructor that it replaces is not called, nor are dependencies of that one alone. A fake that lacks
    a method of the type, or has it with other parameters, is a fault of the graph. A fake ``Member[T]``
    becomes the only member, a fake ``list[Member[T]]`` the whole group.
    """
    return ReplaceCell(caller(), parse_hint(type).key, fake)
