"""Custom resources and their schema: pruning, defaults, validation.

Source: k8s.io/apiextensions-apiserver/pkg/apiserver/{schema,validation}; messages of go-openapi/validate.
CEL rules (x-kubernetes-validations) are not evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.support.apiserver.errors import FieldError, Obj, duplicate, invalid, required, unsupported
from tests.support.apiserver.rules import cidr_problem, ip_problem
from tests.support.apiserver.types import METADATA, Type, builtin_type

_LABEL = "[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_PATTERNS = {
    "byte": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "date": r"\d{4}-\d\d-\d\d",
    "date-time": r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "duration": r"(?i)([0-9]+(\.[0-9]+)?\s*(ns|us|µs|ms|s|m|h|d|w|hours?|minutes?|seconds?))+",
    "email": r"[^@\s]+@[^@\s]+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "uri": r"[A-Za-z][-+.A-Za-z0-9]*:\S+|/\S*",
    "uuid": "[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}",
}


def _fits(text: str, form: str) -> bool:
    """Whether a text is of a format; everything is of an unknown one."""
    if form in _PATTERNS:
        return bool(re.fullmatch(_PATTERNS[form], text))
    if form == "cidr":
        plain = re.sub(r"(?<![\d:])0+(?=\d+\.|\d+/)", "", text)  # leading zeros are tolerated
        return not cidr_problem(plain, strict=False) and text.rpartition("/")[2].isdigit()
    return form not in {"ipv4", "ipv6"} or (not ip_problem(text) and (":" in text) is (form == "ipv6"))


def prune(value: Any, kind: Type, at: str, unknown: list[str], *, preserved: bool = False) -> Any:
    """The value without undeclared fields; they are added to ``unknown``."""
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
        elif kind.preserves or preserved or "additionalProperties" in kind.schema:
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
    found = list(_type_errors(value, kind, at))
    if not found or (isinstance(value, float) and kind.name == "integer"):
        if "enum" in kind.schema and value not in kind.schema["enum"]:
            found.append(unsupported(at, value, [str(one) for one in kind.schema["enum"]]))
        found += _bound_errors(value, kind.schema, at)
        if isinstance(value, str):
            found += _string_errors(value, kind.schema, at)
        elif isinstance(value, list):
            found += _list_errors(value, kind, at)
        elif isinstance(value, dict):
            found += _object_errors(value, kind, at)
    return [*found, *_combined_errors(value, kind.schema, at)]


_NAMES = {
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_FITS = {"integer,string": {"integer", "string"}, "number": {"integer", "number"}}


def _type_errors(value: Any, kind: Type, at: str) -> Iterator[FieldError]:
    given, wanted = _NAMES[type(value)], kind.name
    if wanted == "int-or-string":
        wanted = "integer,string"
    if wanted == "integer" and isinstance(value, float):
        given = "integer" if value.is_integer() else "float64"
    if wanted != "any" and given not in _FITS.get(wanted, {wanted}):
        yield FieldError("typeinvalid", at, f'{at} in body must be of type {wanted}: "{given}"', given)


def _bound_errors(value: Any, schema: Obj, at: str) -> Iterator[FieldError]:
    """What is too small or too large: numbers, and lengths of texts, lists and objects."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
        if bits and (not float(value).is_integer() or not -(2**bits) <= value < 2**bits):
            yield invalid("<nil>", "", f"must be of type integer with format {schema['format']} in {at}")
            if isinstance(value, int):
                return
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None and (value < low or (value == low and schema.get("exclusiveMinimum"))):
            yield invalid(at, value, f"{at} in body should be greater than {low}")
        if high is not None and (value > high or (value == high and schema.get("exclusiveMaximum"))):
            yield invalid(at, value, f"{at} in body should be less than {high}")
        if "multipleOf" in schema and value % schema["multipleOf"]:
            yield invalid(at, value, f"{at} in body should be a multiple of {schema['multipleOf']}")
        return
    for of, what, reason in (
        (str, "Length", "toolong"),
        (list, "Items", "toomany"),
        (dict, "Properties", "toomany"),
    ):
        if isinstance(value, of):
            if len(value) > schema.get(f"max{what}", len(value)):
                yield FieldError(reason, at, f"may not be more than {schema[f'max{what}']}")
            if len(value) < schema.get(f"min{what}", 0):
                yield invalid(at, len(value), f"{at} in body should have at least {schema[f'min{what}']}")


def _string_errors(value: str, schema: Obj, at: str) -> Iterator[FieldError]:
    if "pattern" in schema and not re.search(schema["pattern"].replace(r"\z", r"\Z"), value):
        yield invalid(at, value, f"{at} in body should match '{schema['pattern']}'")
    if not _fits(value, schema.get("format", "")):
        yield FieldError("typeinvalid", at, f"{at} in body must be of type {schema['format']}", value)


def _list_errors(value: list[Any], kind: Type, at: str) -> Iterator[FieldError]:
    keys, seen = kind.list_keys, []
    for number, one in enumerate(value):
        if kind.items is not None:
            yield from schema_errors(one, kind.items, f"{at}[{number}]")
    for number, one in enumerate(value if keys is not None else ()):
        key = (
            {name: one.get(name) for name in keys or () if name in one}
            if keys and isinstance(one, dict)
            else one
        )
        if key in seen:
            yield duplicate(f"{at}[{number}]", key)
        seen.append(key)


def _object_errors(value: Obj, kind: Type, at: str) -> Iterator[FieldError]:
    prefix = f"{at}." if at else ""
    for name in (*kind.required, *(("apiVersion", "kind") if kind.embedded else ())):
        if name not in value:
            yield required(f"{prefix}{name}")
    for name, one in value.items():
        of = kind.properties.get(name) or kind.additional
        if of is not None and not (at == "" and name == "metadata"):
            yield from schema_errors(one, of, f"{prefix}{name}")


def _combined_errors(value: Any, schema: Obj, at: str) -> Iterator[FieldError]:
    if any_of := schema.get("anyOf"):
        results = [_inner_errors(value, one, at) for one in any_of]
        if all(results):
            yield invalid("<nil>", "", f'"{at}" must validate at least one schema (anyOf)')
            yield from results[0]
    if one_of := schema.get("oneOf"):
        results = [_inner_errors(value, one, at) for one in one_of]
        right = sum(not one for one in results)
        if right != 1:
            yield invalid("<nil>", "", f'"{at}" must validate one and only one schema (oneOf): {right} valid')
        if not right:
            yield from min(results, key=len)
    for one in schema.get("allOf") or ():
        yield from _inner_errors(value, one, at)
    if (wrong := schema.get("not")) is not None and not _inner_errors(value, wrong, at):
        yield invalid("<nil>", "", f'"{at}" must not validate the schema (not)')


def _inner_errors(value: Any, schema: Obj, at: str) -> list[FieldError]:
    """The errors of a schema inside a combination, which has no say in what is declared."""
    return schema_errors(value, Type({"type": _NAMES[type(value)], **schema}, custom=True), at)
