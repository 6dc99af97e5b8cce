"""Any value as readable JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

__all__ = ["plain", "text"]

_MAC_LENGTH = 6


def plain(value: object) -> object:
    """`value` in JSON's types: structs as objects, MACs and addresses as usual texts.

    Six bytes are a MAC, other bytes hexadecimal, and a subclass of bytes its repr(); sets are sorted; other
    values become their text.
    """
    result: object
    match value:
        case Enum():
            result = plain(value.value)
        case None | bool() | int() | float() | str():
            result = value
        case bytes() if type(value) is not bytes:
            result = repr(value)
        case bytes():
            result = value.hex(":") if len(value) == _MAC_LENGTH else value.hex()
        case Mapping():
            result = {_key(key): plain(item) for key, item in value.items()}
        case Sequence():
            result = [plain(item) for item in value]
        case set() | frozenset():
            result = sorted(map(plain, value), key=str)
        case _:
            names = _fields(value)
            result = {name: plain(getattr(value, name)) for name in names} if names else str(value)
    return result


def text(value: object) -> str:
    """Return a value of plain() in one cell of a table: lists with commas, mappings as JSON, empty values as
    nothing.
    """
    match value:
        case None | "" | [] | {}:
            return ""
        case str():
            return value
        case list() if not any(isinstance(item, dict | list) for item in value):
            return ", ".join(map(text, value))
    return msgspec.json.encode(value).decode()


def _fields(value: object) -> tuple[str, ...]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    return ()


def _key(key: object) -> str:
    shown = plain(key)
    return shown if isinstance(shown, str) else msgspec.json.encode(shown).decode()
