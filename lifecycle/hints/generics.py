"""Generics: the values of a class's type variables.

``provide(Box[int])`` builds a Box with an int for each parameter of type T; so does a class that derives from
``Box[int]`` and inherits the constructor.
"""

import types
import typing
from collections.abc import Mapping
from typing import Any

__all__ = ["class_of", "filled_in", "open_variables"]

_FORMS = {typing.Annotated, types.UnionType}
"""Origins of hints that Python treats as types but that are not classes."""

Meaning = Mapping[object, object]


def class_of(call: object) -> type | None:
    """Return the class that a call instantiates: Box for ``Box`` and ``Box[int]``; None for a function."""
    if isinstance(call, type):
        return call
    kind = typing.get_origin(call)
    return kind if isinstance(kind, type) and kind not in _FORMS else None


def open_variables(key: object) -> tuple[object, ...]:
    """Return the type variables in a key without a value."""
    if isinstance(key, typing.TypeVar):
        return (key,)
    return () if isinstance(key, type) else getattr(key, "__parameters__", ())


def filled_in(hints: dict[str, Any], call: object, owner: type) -> dict[str, Any]:
    """Return the hints of a method of `owner`, with type variables replaced as in `call`."""
    if not any(map(open_variables, hints.values())):
        return hints
    meaning = _meanings(call).get(owner, {})
    return {name: _fill(hint, meaning) for name, hint in hints.items()}


def _meanings(call: object) -> dict[type, Meaning]:
    """Return the values of type variables in a class and in each of its bases."""
    meanings: dict[type, Meaning] = {}
    pending: list[tuple[object, Meaning]] = [(call, {})]
    while pending:
        alias, around = pending.pop()
        kind = class_of(alias)
        if kind is None or kind in meanings:
            continue
        args = (_fill(arg, around) for arg in typing.get_args(alias))
        meanings[kind] = dict(zip(getattr(kind, "__parameters__", ()), args, strict=False))
        pending += [(base, meanings[kind]) for base in getattr(kind, "__orig_bases__", kind.__bases__)]
    return meanings


def _fill(hint: Any, meaning: Meaning) -> object:
    if isinstance(hint, typing.TypeVar):
        return meaning.get(hint, hint)
    if left := open_variables(hint):
        return hint[tuple(meaning.get(variable, variable) for variable in left)]
    return hint
