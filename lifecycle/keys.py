"""The keys of the graph: types as they stand in hints.

Needs:  nothing.
Gives:  a name for any key, and what is special about some hints (optional, awaitable, not usable at all).

A key is a class (Protocols included), a generic such as ``Table[Device]``, or a NewType: anything hashable
that a type hint may be. Two keys are the same when they compare equal.
"""

import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine

__all__ = ["Key", "full_name", "is_awaitable_hint", "is_union", "origin_class", "split_optional", "type_name"]

Key = object
"""What stands in a hint; hashable, which describe() checks."""


def type_name(key: object) -> str:
    """The short name of a key as a person would write it: ``Table[Device]``."""
    args = typing.get_args(key)
    if is_union(key):
        return " | ".join(map(type_name, args))
    if (origin := typing.get_origin(key)) is not None:
        inner = map(repr, args) if origin is typing.Literal else map(type_name, args)
        return f"{type_name(origin)}[{', '.join(inner)}]"
    if isinstance(key, list):  # the parameters of a Callable
        return f"[{', '.join(map(type_name, key))}]"
    if key is ... or key is type(None):
        return "..." if key is ... else "None"
    name = getattr(key, "__qualname__", None) or getattr(key, "__name__", None)
    return str(name).rpartition("<locals>.")[2] if name else str(key)


def full_name(key: object) -> str:
    """The name of a key with its module: for telling two types of one name apart."""
    module = getattr(origin_class(key) or key, "__module__", None)
    return f"{module}.{type_name(key)}" if module and module != "builtins" else type_name(key)


def origin_class(key: object) -> type | None:
    """The class behind a key: Table for ``Table[Device]``; None when there is none (a NewType)."""
    origin = typing.get_origin(key) or key
    return origin if isinstance(origin, type) else None


def is_union(hint: object) -> bool:
    """Whether the hint is ``A | B`` or Optional."""
    return typing.get_origin(hint) in {typing.Union, types.UnionType}


def split_optional(hint: object) -> tuple[object, bool]:
    """``X | None`` as (X, True), anything else as it is and False."""
    if is_union(hint):
        members = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(members) == 1 and len(members) < len(typing.get_args(hint)):
            return members[0], True
    return hint, False


def is_awaitable_hint(hint: object) -> bool:
    """Whether a result of this type would have to be awaited or iterated asynchronously."""
    return origin_class(hint) in {Awaitable, Coroutine, AsyncGenerator, AsyncIterator}
