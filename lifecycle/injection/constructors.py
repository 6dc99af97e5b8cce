"""Constructors, the nodes of the graph, and their scopes."""

import inspect
from typing import Literal, NewType

import msgspec

from lifecycle.hints.keys import Key, type_name
from lifecycle.hints.places import Place, place_of

__all__ = ["SELF", "Constructor", "Frame", "Kind", "ModuleId", "Parameter", "Part", "Scope"]

ModuleId = NewType("ModuleId", str)
"""The full id of a constructor's module, injected: for names of tables that differ by instance."""

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
        """Whether this is `other` or inside it."""
        scope: Scope | None = self
        while scope is not None:
            if scope is other:
                return True
            scope = scope.parent
        return False


class Frame(msgspec.Struct, eq=False):
    """The decorations around cells: the frame of a module, or of a decorate() with cells."""

    parent: "Frame | None" = None
    decorators: "dict[Key, list[Constructor]]" = msgspec.field(default_factory=dict)
    """By the decorated key; more than one is a fault."""


class Parameter(msgspec.Struct, frozen=True):
    """A dependency of a constructor."""

    name: str
    key: Key
    required: bool = True
    """Whether its absence is a fault; otherwise it is the default, or None for ``X | None``."""
    default: object = inspect.Parameter.empty
    positional: bool = False
    collect: type | None = None
    """list or tuple for the members of a group; None for one value."""
    ordering: bool = False
    """Whether it only orders the constructor after that (see after()), and is not passed."""

    @property
    def has_default(self) -> bool:
        """Whether the function works without it."""
        return self.default is not inspect.Parameter.empty

    @property
    def role(self) -> str:
        """How messages name it to those that need it."""
        return "to come after it" if self.ordering else f"as {self.name!r}"


class Part(msgspec.Struct, frozen=True):
    """One of several results."""

    at: int | str | None
    """Index in the tuple or name of the field; None for the whole result under another type."""
    key: Key


class Constructor(msgspec.Struct, eq=False):
    """One node of the graph: something that is called once, or an existing value."""

    kind: Kind
    call: object
    """The function or class; the value itself for supply, config (the struct) and replace (the fake)."""
    name: str
    key: Key | None
    scope: Scope
    private: bool = False
    prefix: str = ""
    """Prefix of the options of a settings struct."""
    parameters: tuple[Parameter, ...] = ()
    faults: tuple[str, ...] = ()
    needs: "dict[str, Constructor]" = msgspec.field(default_factory=dict)
    """Dependencies by parameter name (``routes[0]`` for members), set when the graph is resolved."""
    groups: "dict[str, list[Constructor]]" = msgspec.field(default_factory=dict)
    """By parameter name, the members that it receives; they are also in `needs`."""
    orders: set[str] = msgspec.field(default_factory=set)
    """Names in `needs` that only order it."""
    injected: dict[str, Key] = msgspec.field(default_factory=dict)
    """Parameters that the hive itself fills, bound to this constructor."""
    replaced: bool = False
    cell_place: Place | None = None
    """The place of a cell that holds a value; functions and classes have places of their own."""
    stands_at: Place | None = None
    """The place of the cell that contains it; None if the constructor's own place is precise enough."""
    parts: tuple[Part, ...] = ()
    """Its results if there are several: a node of kind part provides each."""
    also: tuple[Key, ...] = ()
    """Further types of its one result, each provided by a node of kind part."""
    whole: "Constructor | None" = None
    """For a part: the constructor of the results."""
    part: Part | None = None
    frame: Frame | None = None
    """The decorations around it."""

    @property
    def place(self) -> Place:
        """Where it is defined. Reads the source, so it is computed on use."""
        if self.whole is not None:
            return self.whole.place
        return self.cell_place or place_of(self.call)

    @property
    def provides(self) -> str:
        """The name of what it provides; of all if it has several results."""
        keys = [part.key for part in self.parts] or [self.key, *self.also]
        return " and ".join(map(type_name, keys))

    def uses(self, need: "Constructor") -> bool:
        """Whether it receives that node, rather than being only ordered after it."""
        return any(target is need and name not in self.orders for name, target in self.needs.items())

    def __str__(self) -> str:
        return f"{self.name} ({self.scope.id}) at {self.place}"
