"""Objects in Kubernetes' protobuf, as its own Go clients send them: those that Helm keeps releases in.

Source: k8s.io/apimachinery, runtime.Unknown behind the prefix ``k8s\\0``; the generated.proto files of
        core/v1 and meta/v1; the wire format of Protocol Buffers.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

PREFIX: Final = b"k8s\0"
_METADATA: Final[dict[int, Any]] = {
    1: ("name", "str"),
    2: ("generateName", "str"),
    3: ("namespace", "str"),
    5: ("uid", "str"),
    6: ("resourceVersion", "str"),
    7: ("generation", "int"),
    11: ("labels", "str map"),
    12: ("annotations", "str map"),
    14: ("finalizers", "str list"),
}
_KINDS: Final[dict[tuple[str, str], dict[int, Any]]] = {
    ("v1", "Secret"): {
        1: ("metadata", _METADATA),
        2: ("data", "bytes map"),
        3: ("type", "str"),
        4: ("stringData", "str map"),
        5: ("immutable", "bool"),
    },
    ("v1", "DeleteOptions"): {
        1: ("gracePeriodSeconds", "int"),
        3: ("orphanDependents", "bool"),
        4: ("propagationPolicy", "str"),
        5: ("dryRun", "str list"),
    },
}
_TYPE: Final = {1: ("apiVersion", "str"), 2: ("kind", "str")}


class UnknownMessageError(ValueError):
    """It is not an object, or of a kind that is not supported here."""


def decoded(body: bytes) -> dict[str, Any]:
    """The object as its JSON would say it; empty fields are left out. Raises UnknownMessageError."""
    if not body.startswith(PREFIX):
        raise UnknownMessageError("expected the prefix k8s\\0")
    outer = dict(_fields(body[len(PREFIX) :]))
    meta = _message(outer.get(1, b""), _TYPE)
    kind = (meta.get("apiVersion", ""), meta.get("kind", ""))
    if kind not in _KINDS:
        raise UnknownMessageError(f"{kind[1]} of {kind[0]} is not spoken here")
    return {**meta, **_message(outer.get(2, b""), _KINDS[kind])}


def _message(data: bytes, of: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if number not in of:
            continue
        name, kind = of[number]
        if isinstance(kind, dict):
            found[name] = _message(value, kind)
        elif kind.endswith(" map"):
            entry = dict(_fields(value))
            found.setdefault(name, {})[_text(entry.get(1, b""))] = _plain(entry.get(2, b""), kind.split()[0])
        elif kind.endswith(" list"):
            found.setdefault(name, []).append(_plain(value, kind.split()[0]))
        else:
            found[name] = _plain(value, kind)
    return {name: value for name, value in found.items() if value not in ("", {}, [])}


def _plain(value: Any, kind: str) -> Any:
    match kind:
        case "str":
            return _text(value)
        case "bytes":
            return base64.b64encode(value).decode()
        case "bool":
            return bool(value)
    return value


def _text(value: bytes) -> str:
    return value.decode()


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number -> value: bytes, or a number. Raises UnknownMessageError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
            case 2:
                size, at = _varint(data, at)
                yield key >> 3, data[at : at + size]
                at += size
            case kind:
                raise UnknownMessageError(f"a field of wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
    raise UnknownMessageError("it ends within a number")
