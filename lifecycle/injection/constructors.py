"""Constructors: the nodes of the graph, and what stands around them."""

import inspect
from typing import Literal, NewType

import msgspec

from lifecycle.hints.keys import Key, type_name
from lifecycle.hints.places import Place, place_of

__all__ = ["SELF", "Constructor", "Frame", "Kind", "ModuleId", "Parameter", "Part", "Scope"]

ModuleId = NewType("ModuleId", str)
"""The full id of a constructor's module, injected: to name the tables of each instance."""

SELF = "self"
"""The key of `self` in an invoked unbound method, until the graph finds the class that provides it."""

Kind = Literal["provide", "part", "supply", "config", "decorate", "replace", "invoke"]


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


class Frame(msgspec.Struct, eq=False):
    """What is decorated around cells: a module's frame, or that of decorate() with cells in it."""

    parent: "Frame | None" = None
    decorators: "dict[Key, list[Constructor]]" = msgspec.field(default_factory=dict)
    """By the key they decorate; more than one is a fault."""


class Parameter(msgspec.Struct, frozen=True):
    """Something a constructor asks for."""

    name: str
    key: Key
    required: bool = True
    """Without it in the graph: a fault when required; else the default, or None for ``X | None``."""
    default: object = inspect.Parameter.empty
    positional: bool = False
    collect: type | None = None
    """list or tuple when it asks for the members of a group; None for one value."""
    ordering: bool = False
    """Whether it only comes after that (see after()), and is not given it."""

    @property
    def has_default(self) -> bool:
        """Whether the function knows what to do without it."""
        return self.default is not inspect.Parameter.empty

    @property
    def role(self) -> str:
        """How messages name it to those that need it."""
        return "to come after it" if self.ordering else f"as {self.name!r}"


class Part(msgspec.Struct, frozen=True):
    """One of several results."""

    at: int | str | None
    """Index in the tuple, or name of the field; None for the whole under another type."""
    key: Key


class Constructor(msgspec.Struct, eq=False):
    """One node of the graph: something that is called once, or a value that is there already."""

    kind: Kind
    call: object
    """The function or class; the value itself for supply, config (the struct) and replace (the fake)."""
    name: str
    key: Key | None
    scope: Scope
    private: bool = False
    prefix: str = ""
    """Of the options of a struct of settings."""
    parameters: tuple[Parameter, ...] = ()
    faults: tuple[str, ...] = ()
    needs: "dict[str, Constructor]" = msgspec.field(default_factory=dict)
    """By parameter name (``routes[0]`` for members); filled when the graph is resolved."""
    groups: "dict[str, list[Constructor]]" = msgspec.field(default_factory=dict)
    """By parameter name the members it gets; they are among the needs, too."""
    orders: set[str] = msgspec.field(default_factory=set)
    """Of the names in `needs` those of what it only comes after."""
    injected: dict[str, Key] = msgspec.field(default_factory=dict)
    """Parameters the hive itself fills, bound to this constructor."""
    replaced: bool = False
    cell_place: Place | None = None
    """Where the cell stands that holds a value; functions and classes know their own place."""
    stands_at: Place | None = None
    """Where the cell that contains it stands; None when the constructor's own place is precise enough."""
    parts: tuple[Part, ...] = ()
    """Its results when they are several: each is provided by a node of its own, of kind part."""
    also: tuple[Key, ...] = ()
    """Further types of its one result, each provided by a node of kind part."""
    whole: "Constructor | None" = None
    """For a part: what has it among its results."""
    part: Part | None = None
    frame: Frame | None = None
    """What is decorated around it."""

    @property
    def place(self) -> Place:
        """Where it is written. Looked up when asked for: it reads the source."""
        if self.whole is not None:
            return self.whole.place
        return self.cell_place or place_of(self.call)

    @property
    def provides(self) -> str:
        """The name of what it provides; of everything when it has several results."""
        keys = [part.key for part in self.parts] or [self.key, *self.also]
        return " and ".join(map(type_name, keys))

    def uses(self, need: "Constructor") -> bool:
        """Whether it is given that, and does not only come after it."""
        return any(one is need and name not in self.orders for name, one in self.needs.items())

    def __str__(self) -> str:
        return f"{self.name} ({self.scope.id}) at {self.place}"
