"""Objects in which null stands where something else is expected: it means that nothing was given.

Source: encoding/json of Go, in which null leaves a field as it is, so an API server reads it as absent; of
custom kinds, nulls of fields that are not nullable are pruned (Kubernetes, structural schemas, defaulting
and nullable).
Why:   ``kubectl create --dry-run=client -o yaml`` writes such. Hardly any object from a server has
one, so only what does not fit its definition is looked through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

__all__ = ["convert"]


T = TypeVar("T")
Clean = Callable[[Any], Any]


def convert(value: Any, kind: type[T]) -> T:
    """A value as this type. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        whole: Any = kind
        clean = _cleaner(whole)
        without = clean(value) if clean is not None else value
        if without == value:
            raise
        return msgspec.convert(without, kind)


def decode(text: bytes | str | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """JSON as the type of this decoder. Raises msgspec.DecodeError, UnicodeDecodeError."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        if b"null" not in (text.encode() if isinstance(text, str) else bytes(text)):
            raise
    return convert(msgspec.json.decode(text), decoder.type)


@cache
def _cleaner(kind: Any) -> Clean | None:
    from msgspec.inspect import type_info  # what most agents never need

    return _clean(type_info(kind))


def _clean(of: Any) -> Clean | None:
    """What takes the fields that are null out of values of this type; None where there are no fields."""
    from msgspec import inspect

    if isinstance(of, inspect.UnionType):
        return next((clean for one in of.types if (clean := _clean(one)) is not None), None)
    if isinstance(of, inspect.StructType):
        return _without({one.encode_name: clean for one in of.fields if (clean := _clean(one.type))})
    if isinstance(of, inspect.DictType):
        return _of_map(_clean(of.value_type), texts=isinstance(of.value_type, inspect.StrType))
    if isinstance(of, (inspect.ListType, inspect.VarTupleType)):
        return _of_list(_clean(of.item_type))
    return None


def _without(fields: Mapping[str, Clean]) -> Clean:
    def clean(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        left = {name: one for name, one in value.items() if one is not None}
        for name in fields.keys() & left.keys():
            left[name] = fields[name](left[name])
        return left

    return clean


def _of_map(values: Clean | None, *, texts: bool) -> Clean | None:
    """Of a map; a text that is null is an empty one, as in Go."""

    def clean(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if texts:
            return {name: "" if one is None else one for name, one in value.items()}
        return {name: values(one) if values is not None else one for name, one in value.items()}

    return clean if texts or values is not None else None


def _of_list(items: Clean | None) -> Clean | None:
    """Of a list; an item that is null stays, since no kind allows it."""
    if items is None:
        return None
    return lambda value: [items(one) for one in value] if isinstance(value, list) else value
