"""Custom resources and their schema: pruning, defaults, validation.

Gives: prune, fill_defaults, schema_errors.
Source: k8s.io/apiextensions-apiserver/pkg/apiserver/{schema,validation}; messages of go-openapi/validate.
CEL rules (x-kubernetes-validations) are not evaluated.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable
from typing import Any

from tests.support.apiserver.errors import FieldError, Obj, duplicate, invalid, required, unsupported
from tests.support.apiserver.types import METADATA, Type, builtin_type

_DURATION = re.compile(
    r"([0-9]+(\.[0-9]+)?\s*(ns|us|µs|ms|s|m|h|d|w|hours?|minutes?|seconds?))+", re.IGNORECASE
)
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_UUID = re.compile(r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}")
_HOST = re.compile(
    r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?)*"
)


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _is_cidr(text: str) -> bool:
    address, slash, bits = text.partition("/")
    parts = address.split(".")
    if len(parts) == 4 and all(one.isdigit() for one in parts):  # leading zeros are tolerated
        address = ".".join(str(int(one)) for one in parts)
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return bool(slash) and bits.isdigit() and int(bits) <= found.max_prefixlen


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


_FORMATS: dict[str, Callable[[str], bool]] = {
    "byte": _is_base64,
    "cidr": _is_cidr,
    "date-time": lambda text: bool(_RFC3339.fullmatch(text)),
    "date": lambda text: bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text)),
    "duration": lambda text: bool(_DURATION.fullmatch(text)),
    "email": lambda text: bool(re.fullmatch(r"[^@\s]+@[^@\s]+", text)),
    "hostname": lambda text: bool(_HOST.fullmatch(text)),
    "ipv4": lambda text: _is_ip(text, 4),
    "ipv6": lambda text: _is_ip(text, 6),
    "uri": lambda text: bool(re.fullmatch(r"[A-Za-z][-+.A-Za-z0-9]*:\S+|/\S*", text)),
    "uuid": lambda text: bool(_UUID.fullmatch(text)),
    "mac": lambda text: bool(re.fullmatch(r"([0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}", text)),
}


def prune(value: Any, kind: Type, at: str, unknown: list[str], *, kept: bool = False) -> Any:
    """The value without fields nobody declared; they are added to ``unknown``."""
    if isinstance(value, list):
        of = kind.items
        if of is None:
            return value
        return [prune(one, of, f"{at}[{n}]", unknown) for n, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    made = {}
    for name, one in value.items():
        path = f"{at}.{name}" if at else name
        if kind.embedded and name in {"apiVersion", "kind"}:
            made[name] = one
        elif kind.embedded and name == "metadata":
            made[name] = prune(one, builtin_type(METADATA), path, unknown)
        elif name in kind.properties:
            made[name] = prune(one, kind.properties[name], path, unknown)
        elif kind.additional is not None:
            made[name] = prune(one, kind.additional, path, unknown)
        elif kind.preserves or kept or "additionalProperties" in kind.schema:
            made[name] = one
        else:
            unknown.append(path)
    return made


def fill_defaults(value: Any, kind: Type) -> Any:
    """The value with its defaults; a null that may not be is dropped, or defaulted."""
    if isinstance(value, list):
        return [fill_defaults(one, kind.items) for one in value] if kind.items else value
    if not isinstance(value, dict):
        return value
    made = {}
    for name, one in value.items():
        of = kind.properties.get(name) or kind.additional
        if of is None:
            made[name] = one
        elif one is None and name in kind.properties and not of.schema.get("nullable") and of.name != "any":
            continue
        else:
            made[name] = fill_defaults(one, of)
    for name, of in kind.properties.items():
        if name not in made and of.custom and "default" in of.schema:
            made[name] = fill_defaults(of.schema["default"], of)
    return made


def schema_errors(value: Any, kind: Type, at: str) -> list[FieldError]:
    """What is wrong with a value."""
    if value is None and (kind.schema.get("nullable") or kind.name == "any"):
        return []
    wrong = _type_errors(value, kind, at)
    if wrong and not (isinstance(value, float) and kind.name == "integer"):
        return wrong + _combined_errors(value, kind, at)
    found = wrong + _enum_errors(value, kind.schema, at)
    if isinstance(value, str):
        found += _string_errors(value, kind, at)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found += _number_errors(value, kind, at)
    elif isinstance(value, list):
        found += _list_errors(value, kind, at)
    elif isinstance(value, dict):
        found += _object_errors(value, kind, at)
    return found + _combined_errors(value, kind, at)


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {
        str: "string",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]


def _type_errors(value: Any, kind: Type, at: str) -> list[FieldError]:
    told, wanted = _told(value), kind.name
    if wanted == "int-or-string":
        right, wanted = told in {"integer", "string"}, "integer,string"
    elif wanted == "any":
        return []
    elif wanted == "integer" and isinstance(value, float):
        if value.is_integer():
            return []
        told, wanted, right = "float64", str(kind.schema.get("format") or "integer"), False
    else:
        right = told == wanted or (wanted == "number" and told == "integer")
    if right:
        return []
    return [FieldError("typeinvalid", at, f'{at} in body must be of type {wanted}: "{told}"', told)]


def _enum_errors(value: Any, schema: Obj, at: str) -> list[FieldError]:
    if "enum" in schema and value not in schema["enum"]:
        return [unsupported(at, value, [str(one) for one in schema["enum"]])]
    return []


def _string_errors(value: str, kind: Type, at: str) -> list[FieldError]:
    schema, found = kind.schema, []
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        found.append(FieldError("toolong", at, f"may not be more than {schema['maxLength']} bytes"))
    if "minLength" in schema and len(value) < schema["minLength"]:
        found.append(invalid(at, value, f"{at} in body should be at least {schema['minLength']} chars long"))
    if "pattern" in schema and not re.search(schema["pattern"].replace(r"\z", r"\Z"), value):
        found.append(invalid(at, value, f"{at} in body should match '{schema['pattern']}'"))
    check = _FORMATS.get(schema.get("format", ""))
    if check is not None and not check(value):
        shown = at.removeprefix("status.") if at.startswith("status.") else at
        why = f'{shown} in body must be of type {schema["format"]}: "{value}"'
        found.append(FieldError("typeinvalid", at, why, value))
    return found


def _number_errors(value: float, kind: Type, at: str) -> list[FieldError]:
    schema, found = kind.schema, []
    bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
    if bits and (not float(value).is_integer() or not -(2**bits) <= value < 2**bits):
        why = f"Checked value must be of type integer with format {schema['format']} in {at}"
        found.append(invalid("<nil>", "", why))
        if isinstance(value, int):
            return found
    if "minimum" in schema:
        low, strict = schema["minimum"], schema.get("exclusiveMinimum")
        if value < low or (strict and value == low):
            word = "greater than" if strict else "greater than or equal to"
            found.append(invalid(at, value, f"{at} in body should be {word} {low}"))
    if "maximum" in schema:
        high, strict = schema["maximum"], schema.get("exclusiveMaximum")
        if value > high or (strict and value == high):
            word = "less than" if strict else "less than or equal to"
            found.append(invalid(at, value, f"{at} in body should be {word} {high}"))
    if "multipleOf" in schema and value % schema["multipleOf"]:
        found.append(invalid(at, value, f"{at} in body should be a multiple of {schema['multipleOf']}"))
    return found


def _list_errors(value: list[Any], kind: Type, at: str) -> list[FieldError]:
    schema, found = kind.schema, []
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        why = f"{len(value)}: must have at most {schema['maxItems']} items"
        found.append(FieldError("toomany", at, why))
    if "minItems" in schema and len(value) < schema["minItems"]:
        found.append(invalid(at, len(value), f"{at} in body should have at least {schema['minItems']} items"))
    if kind.items is not None:
        for number, one in enumerate(value):
            found += schema_errors(one, kind.items, f"{at}[{number}]")
    return found + _duplicates(value, kind, at)


def _duplicates(value: list[Any], kind: Type, at: str) -> list[FieldError]:
    keys, seen, found = kind.list_keys, [], []
    if keys is None:
        return []
    for number, one in enumerate(value):
        key = {name: one.get(name) for name in keys if name in one} if keys and isinstance(one, dict) else one
        if key in seen:
            found.append(duplicate(f"{at}[{number}]", key))
        seen.append(key)
    return found


def _object_errors(value: Obj, kind: Type, at: str) -> list[FieldError]:
    schema, found = kind.schema, []
    if "minProperties" in schema and len(value) < schema["minProperties"]:
        why = f"{at} in body should have at least {schema['minProperties']} properties"
        found.append(invalid(at, len(value), why))
    if "maxProperties" in schema and len(value) > schema["maxProperties"]:
        why = f"{len(value)}: must have at most {schema['maxProperties']} items"
        found.append(FieldError("toomany", at, why))
    needed = [*kind.required, *(("apiVersion", "kind") if kind.embedded else ())]
    found += [required(_join(at, name)) for name in needed if name not in value]
    for name, one in value.items():
        of = kind.properties.get(name) or kind.additional
        if of is not None and not (at == "" and name == "metadata"):
            found += schema_errors(one, of, _join(at, name))
    return found


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _combined_errors(value: Any, kind: Type, at: str) -> list[FieldError]:
    schema, found = kind.schema, []
    if any_of := schema.get("anyOf"):
        results = [_inner_errors(value, one, at) for one in any_of]
        if all(results):
            found.append(invalid("<nil>", "", f'"{at}" must validate at least one schema (anyOf)'))
            found += results[0]
    if one_of := schema.get("oneOf"):
        results = [_inner_errors(value, one, at) for one in one_of]
        right = sum(not one for one in results)
        if right != 1:
            told = "Found none valid" if not right else f"Found {right} valid alternatives"
            found.append(
                invalid("<nil>", "", f'"{at}" must validate one and only one schema (oneOf). {told}')
            )
            if not right:
                found += _fewest(results)
    for one in schema.get("allOf") or ():
        found += _inner_errors(value, one, at)
    if (wrong := schema.get("not")) is not None and not _inner_errors(value, wrong, at):
        found.append(invalid("<nil>", "", f'"{at}" must not validate the schema (not)'))
    return found


def _fewest(results: list[list[FieldError]]) -> list[FieldError]:
    found = results[0]
    for one in results[1:]:
        if len(one) < len(found):
            found = one
    return found


def _inner_errors(value: Any, schema: Obj, at: str) -> list[FieldError]:
    """The errors of a schema inside a combination, which has no say in what is declared."""
    return schema_errors(
        value,
        Type({"type": _told(value) if "type" not in schema else schema["type"], **schema}, custom=True),
        at,
    )
