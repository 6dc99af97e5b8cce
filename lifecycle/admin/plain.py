"""Any value as JSON that people can read."""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

__all__ = ["plain", "text"]

_MAC_LENGTH = 6


def plain(value: object) -> object:
    """`value` out of what JSON has: structs as objects, MACs and addresses as people write them.

    Six bytes are a MAC, others hexadecimal, and of a type of their own what that calls them; sets are sorted;
    what is not known otherwise is its text.
    """
    found: object
    match value:
        case Enum():
            found = plain(value.value)
        case None | bool() | int() | float() | str():
            found = value
        case bytes() if type(value) is not bytes:
            found = repr(value)
        case bytes():
            found = value.hex(":") if len(value) == _MAC_LENGTH else value.hex()
        case Mapping():
            found = {_key(key): plain(item) for key, item in value.items()}
        case Sequence():
            found = [plain(item) for item in value]
        case set() | frozenset():
            found = sorted(map(plain, value), key=str)
        case _:
            names = _fields(value)
            found = {name: plain(getattr(value, name)) for name in names} if names else str(value)
    return found


def text(value: object) -> str:
    """A value of plain() in one cell of a table: nothing for what is empty, lists with commas, else JSON."""
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
