"""The keys of the graph: types as written in hints.

A key is a class (including Protocols), a generic such as ``Table[int, Device]``, a NewType, or one of these
with a name or as a member: any hashable type hint. Keys that compare equal are the same key.
"""

import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Sequence
from typing import Annotated, Any

import msgspec

from lifecycle.hints.named import MEMBER, Mark, Named

__all__ = [
    "Key",
    "Requested",
    "full_name",
    "hint_text",
    "is_awaitable_hint",
    "is_member",
    "is_union",
    "key_of",
    "member_of",
    "origin_class",
    "parse_hint",
    "plain",
    "set_alias",
    "split_optional",
    "type_name",
    "unaliased",
]

Key = object
"""A type hint; hashable, which describe() checks."""

_CALLED: dict[type, str] = {type(None): "None"}
"""Classes with a better known public name."""
_COLLECTIONS = {list, tuple, Sequence, Collection, Iterable}


class Requested(msgspec.Struct, frozen=True):
    """What the hint of a parameter requests."""

    key: Key
    """For members ``list[Member[T]]``, in whichever form the hint has it."""
    optional: bool = False
    collect: type | None = None
    """The collection in which members are passed, list or tuple; None for a single value."""


def key_of(hint: object) -> Key:
    """Return the key of a hint: keeps Named and Member, drops other annotations.

    Equal hints have equal keys.
    """
    if isinstance(hint, type) or hint is None:  # fast path
        return type(None) if hint is None else hint
    hint = unaliased(hint)
    args = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        marks = sorted((arg for arg in args[1:] if isinstance(arg, Mark)), key=lambda mark: mark is MEMBER)
        return _annotated(key_of(args[0]), marks)
    if not isinstance(origin, type) or is_union(hint):
        return hint
    if not args:
        return hint if isinstance(hint, types.GenericAlias) else origin  # tuple[()]; List, which is list
    try:  # List[int] is list[int]
        return origin[tuple(map(key_of, args))]  # type: ignore[index]  # generic, as it has arguments
    except TypeError:  # a hint that only typing can subscript
        return hint


def unaliased(hint: object) -> object:
    """Return the type behind an alias ``type X = ...``; any other hint unchanged. Source: PEP 695."""
    while True:
        alias: Any = typing.get_origin(hint) or hint
        if type(alias).__name__ != "TypeAliasType":  # typing's from 3.12 on, or typing_extensions'
            return hint
        value: Any = alias.__value__
        hint = value[typing.get_args(hint)] if typing.get_args(hint) else value


def parse_hint(hint: object) -> Requested:
    """Read the hint of a parameter."""
    hint = unaliased(hint)
    inner, optional = split_optional(hint)
    if typing.get_origin(inner) is Annotated:  # Annotated[X | None, Named(...)]
        bare, inside = split_optional(typing.get_args(inner)[0])
        inner, optional = _annotated(bare, typing.get_args(inner)[1:]), optional or inside
    key = key_of(inner)
    args = typing.get_args(key)
    if args and is_member(args[0]) and typing.get_origin(key) in _COLLECTIONS and args[1:] in {(), (...,)}:
        collect = list if typing.get_origin(key) is list else tuple
        return Requested(list[args[0]], optional, collect)  # type: ignore[valid-type]  # made at run time
    return Requested(key, optional)


def _annotated(key: Key, marks: Iterable[object]) -> Key:
    for mark in marks:
        key = Annotated[key, mark]
    return key


def plain(key: Key) -> Key:
    """Return the key without name and membership."""
    return typing.get_args(key)[0] if typing.get_origin(key) is Annotated else key


def is_member(key: Key) -> bool:
    """Whether the key is ``Member[T]``: one of many."""
    if isinstance(key, type):
        return False
    return typing.get_origin(key) is Annotated and MEMBER in typing.get_args(key)[1:]


def member_of(key: Key) -> Key | None:
    """``Member[T]`` for the key ``list[Member[T]]``; None for any other key."""
    args = typing.get_args(key) if typing.get_origin(key) is list else ()
    return args[0] if args and is_member(args[0]) else None


def type_name(key: object) -> str:
    """Return the short name of a key for messages: ``Table[int, Device]``, ``int named 'http'``."""
    if isinstance(key, type):  # fast path
        return _CALLED.get(key) or key.__qualname__.rpartition("<locals>.")[2]
    args, origin = typing.get_args(key), typing.get_origin(key)
    if is_union(key):
        text = " | ".join(map(type_name, args))
    elif origin is Annotated:
        text = _marked(type_name(args[0]), args[1:], "{} named {!r}")
    elif origin is not None and origin is not key:
        inner = map(repr, args) if origin is typing.Literal else map(type_name, args)
        text = f"{type_name(origin)}[{', '.join(inner)}]"
    elif isinstance(key, list):  # the parameters of a Callable
        text = f"[{', '.join(map(type_name, key))}]"
    else:
        name = getattr(key, "__qualname__", None) or getattr(key, "__name__", None)
        text = "..." if key is ... else str(name or key).rpartition("<locals>.")[2]
    return text


def set_alias(key: type, name: str) -> None:
    """Let type_name() show `name` for a class that another package provides under that alias."""
    _CALLED[key] = name


def hint_text(key: Key) -> str:
    """Return a key as written in a hint: ``Annotated[int, Named('http')]``."""
    if typing.get_origin(key) is not Annotated:
        return type_name(key)
    args = typing.get_args(key)
    return _marked(type_name(args[0]), args[1:], "Annotated[{}, Named({!r})]")


def _marked(text: str, marks: Iterable[object], form: str) -> str:
    for mark in marks:
        if isinstance(mark, Named):
            text = form.format(text, mark.name)
        elif mark is MEMBER:
            text = f"Member[{text}]"
    return text


def full_name(key: object) -> str:
    """Return the name of a key with its module and function, to distinguish types of one name."""
    kind = origin_class(key) or key
    around = getattr(kind, "__qualname__", "").rpartition("<locals>.")[0].replace("<locals>.", "")
    module = getattr(kind, "__module__", None)
    return f"{module}.{around}{type_name(key)}" if module and module != "builtins" else type_name(key)


def origin_class(key: object) -> type | None:
    """Return the class of a key: Table for ``Table[int, Device]``; None if there is none (a NewType)."""
    if isinstance(key, type):
        return key
    key = plain(key)
    origin = typing.get_origin(key) or key
    return origin if isinstance(origin, type) else None


def is_union(hint: object) -> bool:
    """Whether the hint is ``A | B`` or Optional."""
    return not isinstance(hint, type) and typing.get_origin(hint) in {typing.Union, types.UnionType}


def split_optional(hint: object) -> tuple[object, bool]:
    """``X | None`` as (X, True), any other hint unchanged and False."""
    if is_union(hint):
        members = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(members) == 1 and len(members) < len(typing.get_args(hint)):
            return members[0], True
    return hint, False


def is_awaitable_hint(hint: object) -> bool:
    """Whether a result of this type would have to be awaited or iterated asynchronously."""
    kind: Any = origin_class(hint)
    return kind in {AsyncGenerator, AsyncIterator} or hasattr(kind, "__await__")
