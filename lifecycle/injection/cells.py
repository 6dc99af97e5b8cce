"""Cells: the values a hive is composed of.

A cell is a declaration only. Nothing is inspected, let alone called, before a Hive does so.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from lifecycle.hints.keys import Key, key_of, wanted
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
    """A part of a hive. Made by the functions of this module, given to module(), group() or Hive()."""

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
    """What each result is named, if anything."""
    as_: tuple[object, ...] = ()
    """Further types that the result of its one constructor is provided under."""


class ConfigCell(Cell, frozen=True, eq=False):
    """Structs of settings."""

    structs: tuple[type[Settings], ...]
    prefix: str = ""
    private: bool = False


class DecorateCell(Cell, frozen=True, eq=False):
    """A function around what is provided, for the cells in it; for the whole module when there are none."""

    function: Callable[..., object]
    cells: tuple[Cell, ...]


class InvokeCell(Cell, frozen=True, eq=False):
    """Functions to call once: the roots of what is built."""

    functions: tuple[Callable[..., object], ...]


class SupplyCell(Cell, frozen=True, eq=False):
    """A value that is there already."""

    value: object
    key: Key
    checked: bool = True
    """Whether it is one; what stands for a value in a graph that is only looked at is none."""


class ReplaceCell(Cell, frozen=True, eq=False):
    """A value in place of whatever provides the key."""

    key: Key
    fake: object


def module(id: str, title: str, *cells: Cell) -> Cell:  # noqa: A002  # the field's word, always positional
    """Cells in a named scope: their logger, health and jobs carry its id, what they keep private stays in it.

    The id is kebab-case; inside another module the full id is dotted (``agent.ipam``).
    """
    return ModuleCell(caller(), id, title, cells)


def group(*cells: Cell) -> Cell:
    """Several cells as one, without a scope of their own."""
    return GroupCell(caller(), cells)


def provide(*constructors: Callable[..., object], name: str = "", as_: tuple[Any, ...] = ()) -> Cell:
    """Constructors of values that every module of the hive may depend on.

    A constructor is a class, or a function with a result type. Its parameters' type hints say what it needs.
    It is called at most once, and only when something invoked needs its result. It must be pure: build
    objects, touch nothing outside; work happens in hooks.

    ``T | None`` and a default are for when nothing provides T; what is private elsewhere counts as nothing.
    ``Annotated[T, Named("x")]`` is another key than T; ``Member[T]`` contributes to ``list[Member[T]]``. A
    result ``tuple[A, B]``, or a dataclass marked with @results, provides each of its types. With `name` every
    result is provided under that name, as if its hint were ``Annotated[T, Named(name)]``: for a module that a
    hive has more than once.

    ``provide(Impl, as_=(A, B))`` gives the one instance under its own type and under A and B, which others
    ask for: Protocols, base classes, ``Member[T]``. The check refuses a class that lacks a method of them.
    """
    return ProvideCell(caller(), constructors, private=False, name=name, as_=as_)


def provide_private(*constructors: Callable[..., object], name: str = "", as_: tuple[Any, ...] = ()) -> Cell:
    """As provide(), but visible only in the enclosing module, and in modules below."""
    return ProvideCell(caller(), constructors, private=True, name=name, as_=as_)


def config(*structs: type[Settings], prefix: str = "") -> Cell:
    """Structs of settings: every field becomes a flag, an environment variable and a config-dir key.

    The struct itself, filled, is what constructors ask for by its type. With a `prefix` the names of its
    options begin with that and a dash: ``timeout`` of the prefix ``inside`` is ``--inside-timeout``.
    """
    return ConfigCell(caller(), structs, prefix)


def config_private(*structs: type[Settings], prefix: str = "") -> Cell:
    """As config(), but the struct is visible only in the enclosing module, and in modules below.

    So a hive may have a module several times, each with settings of its own: give each another prefix.
    """
    return ConfigCell(caller(), structs, prefix, private=True)


def decorate(function: Callable[..., object], *cells: Cell) -> Cell:
    """`function` around what it returns, wherever one of `cells` asks for that type.

    It takes the value and returns what to use in its place (``def traced(client: Client) -> Client``); it may
    ask for more. Everyone else gets the value as it is, and so does the function. Decorations nest, the
    innermost is applied last. Without cells it holds for the whole enclosing module, or hive, and for what
    is below. What replace() puts in is used as it is.
    """
    return DecorateCell(caller(), function, cells)


def invoke(*functions: Callable[..., object]) -> Cell:
    """The roots: each is called once with what it asks for, in the order given, and only that gets built.

    An unbound method (``Server.serve``) is called on the Server of the graph. A type (``Table[int, Device]``)
    represents its instance in the graph: that is built and nothing more.
    """
    return InvokeCell(caller(), functions)


def supply(value: object, type: Any = None) -> Cell:  # noqa: A002  # reads as it is meant: supply(x, type=Clock)
    """A value as it is, provided under its own type or under `type`."""
    return SupplyCell(caller(), value, value.__class__ if type is None else key_of(type))


def replace(type: Any, fake: object) -> Cell:  # noqa: A002  # the type to replace
    """`fake` wherever `type` is asked for, whether or not something provides it: for tests.

    The constructor it replaces is not called, nor is what only that one needed. A fake that lacks a
    method of the type, or has it with other parameters, is a fault of the graph. A fake ``Member[T]`` is the
    only member left, a fake ``list[Member[T]]`` is the whole group.
    """
    return ReplaceCell(caller(), wanted(type).key, fake)
