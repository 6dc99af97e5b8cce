"""Go's gob encoding of nested structs: a message for each type, then one for the value.

The monitor protocol and access log records use it. Source: Go's package encoding/gob.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = [
    "BYTES",
    "INT",
    "STRING",
    "UINT",
    "GobError",
    "Type",
    "decode",
    "encode",
    "int_bytes",
    "message",
    "uint_bytes",
]

INT, UINT, BYTES, STRING = 2, 3, 5, 6
"""gob's own types, by number."""
OPAQUE = 6
"""Field of a wireType for types that encode themselves (encoding.BinaryMarshaler)."""


class GobError(ValueError):
    """Received data is not valid gob, or has unsupported types."""


class Type(msgspec.Struct, frozen=True):
    """A gob type: a struct of ``fields``, a slice of ``of``, a map from string to ``of``, or opaque bytes."""

    name: str
    fields: Mapping[str, int] | None = None
    of: int = 0
    by_text: bool = False

    @property
    def form(self) -> int:
        """Number of the wireType's field that defines such a type."""
        return 3 if self.fields is not None else 4 if self.by_text else 2 if self.of else OPAQUE


_COMMON, _FIELD, _FIELDS, _ARRAY, _SLICE, _STRUCT, _MAP, _OPAQUE, _WIRE = range(-9, 0)
_BUILTIN_TYPES: Final[dict[int, Type]] = {  # the types of type definitions
    _COMMON: Type("CommonType", {"Name": STRING, "Id": INT}),
    _FIELD: Type("fieldType", {"Name": STRING, "Id": INT}),
    _FIELDS: Type("[]fieldType", of=_FIELD),
    _ARRAY: Type("arrayType", {"CommonType": _COMMON, "Elem": INT, "Len": INT}),
    _SLICE: Type("sliceType", {"CommonType": _COMMON, "Elem": INT}),
    _STRUCT: Type("structType", {"CommonType": _COMMON, "Field": _FIELDS}),
    _MAP: Type("mapType", {"CommonType": _COMMON, "Key": INT, "Elem": INT}),
    _OPAQUE: Type("gobEncoderType", {"CommonType": _COMMON}),
    _WIRE: Type(
        "wireType",
        {
            "ArrayT": _ARRAY,
            "SliceT": _SLICE,
            "StructT": _STRUCT,
            "MapT": _MAP,
            "GobEncoderT": _OPAQUE,
            "BinaryMarshalerT": _OPAQUE,
            "TextMarshalerT": _OPAQUE,
        },
    ),
}


def encode(types: Mapping[int, Type], value: Mapping[str, Any]) -> bytes:
    """Encode a value of the first of ``types`` (by number, from 65 on), after their definitions."""
    first = next(iter(types))
    definitions = (message(int_bytes(-number) + _define(number, kind)) for number, kind in types.items())
    return b"".join(definitions) + message(int_bytes(first) + _write(types, first, value))


def _define(number: int, kind: Type) -> bytes:
    common = {"Name": kind.name, "Id": number}
    if kind.fields is not None:
        fields = [{"Name": name, "Id": one} for name, one in kind.fields.items()]
        wire: dict[str, Any] = {"StructT": {"CommonType": common, "Field": fields}}
    elif kind.by_text:
        wire = {"MapT": {"CommonType": common, "Key": STRING, "Elem": kind.of}}
    elif kind.of:
        wire = {"SliceT": {"CommonType": common, "Elem": kind.of}}
    else:
        wire = {"BinaryMarshalerT": {"CommonType": common}}
    return _write(_BUILTIN_TYPES, _WIRE, wire)


def _write(types: Mapping[int, Type], kind: int, value: Any) -> bytes:
    if kind in (INT, UINT):
        return int_bytes(value) if kind == INT else uint_bytes(value)
    of = types.get(kind)
    if of is None or of.form == OPAQUE:
        data = value.encode() if isinstance(value, str) else value
        return uint_bytes(len(data)) + data
    if (
        of.fields is not None
    ):  # zero fields are omitted; each field is preceded by the distance from the last one
        found, last = b"", -1
        for position, (name, inner) in enumerate(of.fields.items()):
            if one := value.get(name):
                found += uint_bytes(position - last) + _write(types, inner, one)
                last = position
        return found + b"\0"
    if of.by_text:
        pairs = (_write(types, STRING, key) + _write(types, of.of, one) for key, one in value.items())
        return uint_bytes(len(value)) + b"".join(pairs)
    return uint_bytes(len(value)) + b"".join(_write(types, of.of, one) for one in value)


def decode(data: bytes) -> dict[str, Any]:
    """Decode the first value, a struct, to a dict by field names. Raises GobError."""
    types = dict(_BUILTIN_TYPES)
    position = 0
    try:
        while True:
            size, position = _read_uint(data, position)
            message = data[position : position + size]
            position += size
            number, start = _read_int(message, 0)
            if number > 0:
                value, _ = _read(types, number, message, start)
                return dict(value)
            types[-number] = _defined(_read(types, _WIRE, message, start)[0])
    except (IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise GobError(f"invalid gob data: {error!r}") from None


def _defined(wire: Mapping[str, Any]) -> Type:
    ((form, content),) = wire.items()
    name = content["CommonType"].get("Name", "")
    if form == "StructT":
        return Type(name, {one["Name"]: one["Id"] for one in content.get("Field", ())})
    if form in ("SliceT", "ArrayT"):
        return Type(name, of=content["Elem"])
    return Type(name, of=content["Elem"], by_text=True) if form == "MapT" else Type(name)


def _read(types: Mapping[int, Type], kind: int, data: bytes, at: int) -> tuple[Any, int]:
    """Read a value; return it and the position after it."""
    if kind == INT:
        return _read_int(data, at)
    if kind in (1, UINT):
        return _read_uint(data, at)
    if kind in (STRING, BYTES) or (kind in types and types[kind].form == OPAQUE):
        size, at = _read_uint(data, at)
        if at + size > len(data):
            raise IndexError("truncated text")
        found = data[at : at + size]
        return (found if kind == BYTES else found.decode()), at + size
    of = types[kind]
    if of.fields is not None:
        return _read_struct(types, of.fields, data, at)
    count, at = _read_uint(data, at)
    items: list[tuple[Any, Any]] = []
    for position in range(count):
        key, at = _read(types, STRING, data, at) if of.by_text else (position, at)
        one, at = _read(types, of.of, data, at)
        items.append((key, one))
    return (dict(items) if of.by_text else [one for _, one in items]), at


def _read_struct(
    types: Mapping[int, Type], fields: Mapping[str, int], data: bytes, at: int
) -> tuple[dict[str, Any], int]:
    names = list(fields)
    found: dict[str, Any] = {}
    position = -1
    while True:
        step, at = _read_uint(data, at)
        if not step:
            return found, at
        position += step
        found[names[position]], at = _read(types, fields[names[position]], data, at)


def message(content: bytes) -> bytes:
    """Prefix the data with its length."""
    return uint_bytes(len(content)) + content


def uint_bytes(value: int) -> bytes:
    """Encode an unsigned number: one byte below 128, else the negated byte count and the bytes."""
    if value < 128:
        return bytes((value,))
    size = (value.bit_length() + 7) // 8
    return bytes((256 - size,)) + value.to_bytes(size, "big")


def int_bytes(value: int) -> bytes:
    """Encode a signed number: shifted left, with the sign in the lowest bit."""
    return uint_bytes(~value << 1 | 1 if value < 0 else value << 1)


def _read_uint(data: bytes, at: int) -> tuple[int, int]:
    first = data[at]
    if first < 128:
        return first, at + 1
    end = at + 1 + 256 - first
    if end > len(data):
        raise IndexError("truncated number")
    return int.from_bytes(data[at + 1 : end], "big"), end


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_uint(data, at)
    return (~(value >> 1) if value & 1 else value >> 1), at
