"""Whether a fake can stand in for a type.

Needs:  nothing.
Gives:  unlike(), what a fake lacks.

A fake need not derive from the type: it must have the type's public methods, awaitable where those are, and
callable with their parameters.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from lifecycle.keys import Key, origin_class, type_name

__all__ = ["unlike"]


def unlike(fake: object, key: Key) -> Iterator[str]:
    """What keeps `fake` from standing in for `key`; nothing when it can."""
    kind = origin_class(key)
    if kind is None:  # a NewType says nothing of what its values can do
        return
    if isinstance(fake, type) and kind is not type:
        yield f"{type_name(fake)} is a class: give an instance of it"
        return
    if kind in type(fake).__mro__ or not _members(kind):
        if not isinstance(fake, kind) and not _members(kind):
            yield f"it is of type {type_name(type(fake))}, not {type_name(key)}"
        return
    for name, wanted in _members(kind).items():
        yield from _unlike_member(fake, name, wanted)


def _members(kind: type) -> dict[str, object]:
    """Public methods and properties of a class, and the attributes it declares."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base is object or base.__module__ == "typing":
            continue
        found |= dict.fromkeys(base.__dict__.get("__annotations__", {}))
        found |= vars(base)
    return {name: member for name, member in found.items() if not name.startswith("_")}


def _unlike_member(fake: object, name: str, wanted: object) -> Iterator[str]:
    has = _static(fake, name)
    if has is _MISSING:
        yield f"it has no {name}"
        return
    wanted = _function(wanted)
    if not inspect.isfunction(wanted):
        return
    if not callable(has := getattr(fake, name)):
        yield f"its {name} is no method"
        return
    if inspect.iscoroutinefunction(wanted) and inspect.isfunction(_function(has)) and not _awaitable(has):
        yield f"its {name} is not async"
    try:
        signature = inspect.signature(has)
    except ValueError:  # written in C
        return
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    try:
        signature.bind(
            *[p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}],
            **{p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError as error:
        yield f"its {name}{signature} cannot be called as {name}{inspect.signature(wanted)}: {error}"


_MISSING = object()


def _static(fake: object, name: str) -> object:
    """The attribute without running a property."""
    return inspect.getattr_static(fake, name, _MISSING)


def _function(member: Any) -> object:
    return getattr(member, "__func__", member)


def _awaitable(member: object) -> bool:
    return inspect.iscoroutinefunction(member)
