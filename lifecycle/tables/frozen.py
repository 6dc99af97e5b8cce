"""Whether values of a type are immutable.

Why: a row that is changed in place and put again equals the stored one, so no watcher would see the change.
"""

import dataclasses
import enum
import typing

import msgspec

from lifecycle.hints.keys import is_union, origin_class

__all__ = ["unfrozen", "unfrozen_rows"]

_ANY = (object, typing.Any)
"""Rows of any type: each is checked when it is written."""

_ADVICE = "a frozen dataclass or msgspec Struct, a NamedTuple, a tuple or a plain value"


def unfrozen(kind: type) -> str | None:
    """Why values of this type may change, with the expected type; None if they cannot change.

    Checks the type alone: a field of a frozen row may be a list, which must not be changed then.
    """
    why = _why(kind)
    return None if why is None else f"{kind.__qualname__} {why}: expected {_ADVICE}"


def unfrozen_rows(hint: object) -> str | None:
    """Why rows of a table with this hint, as ``Table[str, Pod]``, may change; None for rows of any type."""
    for row in typing.get_args(hint)[1:]:
        kinds = typing.get_args(row) if is_union(row) else (row,)
        for kind in (origin_class(member) for member in kinds):
            if isinstance(kind, type) and kind not in _ANY and (why := unfrozen(kind)) is not None:
                return why
    return None


def _why(kind: type) -> str | None:
    if issubclass(kind, msgspec.Struct):
        return None if kind.__struct_config__.frozen else "is a Struct that is not frozen"
    if dataclasses.is_dataclass(kind):
        frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # of every dataclass
        return None if frozen else "is a dataclass that is not frozen"
    if issubclass(kind, tuple | enum.Enum):
        return None
    if kind.__hash__ is None:
        return "can be changed in place"
    if kind.__hash__ is object.__hash__:
        return "is compared by identity, not by value"
    return None
