"""JSON Schema of settings structs."""

import enum
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from typing import Any

from lifecycle.settings import values
from lifecycle.settings.durations import Duration
from lifecycle.settings.macs import MAC
from lifecycle.settings.options import Option
from lifecycle.settings.quantities import Quantity
from lifecycle.settings.secrets import Secret

__all__ = ["plain", "schema", "type_schema"]

Schema = dict[str, Any]
"""A JSON Schema."""

_DURATION = r"^[+-]?(0|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$"
_QUANTITY = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
_PAIR = "[0-9A-Fa-f]{2}"
_MAC = rf"^({_PAIR}(:{_PAIR}){{5}}|{_PAIR}(-{_PAIR}){{5}}|({_PAIR}{_PAIR}\.){{2}}{_PAIR}{_PAIR})$"

_TYPES: dict[object, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    Path: {"type": "string", "minLength": 1},
    Duration: {"type": "string", "pattern": _DURATION},
    Quantity: {"type": ["integer", "string"], "pattern": _QUANTITY},
    Secret: {"type": "string", "writeOnly": True},
    MAC: {"type": "string", "pattern": _MAC},
    IPv4Address: {"type": "string", "format": "ipv4"},
    IPv4Interface: {"type": "string", "format": "ipv4-interface"},
    IPv4Network: {"type": "string", "format": "ipv4-network"},
    IPv6Address: {"type": "string", "format": "ipv6"},
    IPv6Interface: {"type": "string", "format": "ipv6-interface"},
    IPv6Network: {"type": "string", "format": "ipv6-network"},
    IPv4Address | IPv6Address: {"type": "string", "format": "ip"},
    IPv4Network | IPv6Network: {"type": "string", "format": "ip-network"},
}


def schema(options: Iterable[Option], title: str) -> Schema:
    """Return an object with these options and no others. Old names are included, marked as deprecated."""
    options = sorted(options, key=lambda option: option.name)
    properties: Schema = {}
    needed: list[Schema] = []
    for option in options:
        properties[option.name] = _property(option)
        if option.file_name:
            text = f"File that holds {option.name}, instead of the value itself."
            properties[option.file_name] = {"type": "string", "minLength": 1, "description": text}
        for old in option.renamed_from:
            renamed = {"description": f"Now called {option.name}.", "deprecated": True}
            properties[old] = type_schema(option.kind) | option.limits.schema(option.kind) | renamed
        if option.required:
            needed.append({"anyOf": [{"required": [name]} for name in option.names]})
    result: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return result | ({"allOf": needed} if needed else {})


def type_schema(kind: object) -> Schema:
    """Return the schema of values of a type."""
    base, optional = values.bare(kind)
    if choices := values.choices(base):
        result: Schema = {"enum": [plain(choice) for choice in choices]}
    elif values.is_list(base):
        result = {"type": "array", "items": type_schema(values.items(base)[0])}
    elif values.is_map(base):
        result = {"type": "object", "additionalProperties": type_schema(values.items(base)[0])}
    else:
        result = dict(_TYPES[base])
    if not optional:
        return result
    if choices:
        return {"enum": [*result["enum"], None]}
    types = result["type"]
    return result | {"type": [*(types if isinstance(types, list) else [types]), "null"]}


def plain(value: object) -> object:
    """Return a value in JSON, in a form that the option accepts."""
    match value:
        case Duration() | Quantity():
            return str(value)
        case None | bool() | int() | float():
            return value
        case enum.Enum():
            return plain(value.value)
        case list() | tuple():
            return [plain(part) for part in value]
        case Mapping():
            return {values.show(key): plain(part) for key, part in value.items()}
        case _:
            return (
                sorted(map(plain, value), key=str)
                if isinstance(value, set | frozenset)
                else values.show(value)
            )


def _property(option: Option) -> Schema:
    result = type_schema(option.kind) | option.limits.schema(option.kind)
    if option.help:
        result["description"] = option.help
    if not option.required and not option.secret:
        result["default"] = plain(option.default)
    return result
