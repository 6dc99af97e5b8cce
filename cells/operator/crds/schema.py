"""Structural schemas: of the structs that objects are read into, and of what has no struct.

Needs: the structs of cells.kubernetes.   Gives: Shapes, obj(), items(), texts() and the parts shared.
Source: apiextensions.k8s.io/v1 JSONSchemaProps; "Specifying a structural schema" of the Kubernetes
        documentation: every level has a type, unknown fields are pruned unless a level keeps them.

A struct is narrower than Cilium's object in some places. There the schema keeps unknown fields: the API
server would drop them otherwise, for everybody else too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from cells.kubernetes import Condition, Meta, Selector

Schema = dict[str, Any]

KEEP: Final = "x-kubernetes-preserve-unknown-fields"
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
NUMBER: Final[Schema] = {"type": "integer"}
CIDR: Final[Schema] = {"type": "string", "format": "cidr"}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
LABEL_VALUE: Final = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"


def obj(required: str = "", /, **properties: Schema) -> Schema:
    """An object; of required properties the names, with blanks between."""
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": required.split()} if required else found


def exactly_one(names: str, of: Schema) -> Schema:
    """An object that has exactly one of these properties; names with blanks between."""
    return {**of, "oneOf": [{"required": [one], "properties": {one: {}}} for one in names.split()]}


def items(of: Schema, **limits: int) -> Schema:
    """A list."""
    return {"type": "array", "items": of, **limits}


def texts(of: Schema = TEXT) -> Schema:
    """A map of texts to these."""
    return {"type": "object", "additionalProperties": of}


def matched(pattern: str, **limits: int) -> Schema:
    """A text that a pattern matches."""
    return {"type": "string", "pattern": pattern, **limits}


def among(*choices: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(choices)}


def within(least: int, most: int, form: str = "") -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": least, "maximum": most, **({"format": form} if form else {})}


def immutable(of: Schema, name: str) -> Schema:
    """What cannot be changed once it is there."""
    rule = {"rule": "self == oldSelf", "message": f"{name} is immutable"}
    return {**of, "x-kubernetes-validations": [rule]}


def _atomic(of: Schema) -> Schema:
    return {**items(of), "x-kubernetes-list-type": "atomic"}


def _selector(operator: Schema, value: Schema) -> Schema:
    expression = obj("key operator", key=TEXT, operator=operator, values=_atomic(TEXT))
    return obj(matchExpressions=_atomic(expression), matchLabels=texts(value))


SELECTOR: Final = _selector(
    among("In", "NotIn", "Exists", "DoesNotExist"), matched(LABEL_VALUE, maxLength=63)
)
"""A label selector as Cilium has it: the keys may have a source before them."""
PLAIN_SELECTOR: Final = _selector(TEXT, TEXT)
"""metav1.LabelSelector."""

_QUALIFIED: Final = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
CONDITIONS: Final[Schema] = {
    **items(
        obj(
            "lastTransitionTime message reason status type",
            lastTransitionTime=TIME,
            message={"type": "string", "maxLength": 32768},
            observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
            reason=matched(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", minLength=1, maxLength=1024),
            status=among("True", "False", "Unknown"),
            type=matched(_QUALIFIED, maxLength=316),
        )
    ),
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
"""metav1.Condition, one of each type."""

_LIMITS: Final = {
    "ge": "minimum",
    "le": "maximum",
    "pattern": "pattern",
    "min_length": "minLength",
    "max_length": "maxLength",
}
_LIST_LIMITS: Final = {"min_length": "minItems", "max_length": "maxItems"}


class Shapes:
    """Turns structs into schemas. ``open_`` names those narrower than the object: they keep the rest."""

    def __init__(
        self, open_: frozenset[str] = frozenset(), special: Mapping[type[Any], Schema] | None = None
    ) -> None:
        self._open = open_
        self._special: dict[type[Any], Schema] = {
            Selector: SELECTOR,
            **(special or {}),
        }

    def of(self, struct: type[msgspec.Struct]) -> Schema:
        """The schema of an object of this struct."""
        return self._type(inspect.type_info(struct))

    def _type(self, found: inspect.Type) -> Schema:
        if isinstance(found, inspect.Metadata):
            return {**self._type(found.type), **(found.extra_json_schema or {})}
        if isinstance(found, inspect.UnionType):
            (one,) = (each for each in found.types if not isinstance(each, inspect.NoneType))
            return self._type(one)
        if isinstance(found, inspect.StructType):
            return self._struct(found)
        if isinstance(found, inspect.VarTupleType):
            return self._list(found)
        if isinstance(found, inspect.DictType):
            return texts(self._type(found.value_type))
        return _plain(found)

    def _list(self, found: inspect.VarTupleType) -> Schema:
        if isinstance(found.item_type, inspect.StructType) and found.item_type.cls is Condition:
            return CONDITIONS
        return items(self._type(found.item_type), **_limits(found, _LIST_LIMITS))

    def _struct(self, found: inspect.StructType) -> Schema:
        if found.cls in self._special:
            return self._special[found.cls]
        if issubclass(found.cls, Meta):
            return {"type": "object"}
        required = " ".join(one.encode_name for one in found.fields if one.required)
        made = obj(required, **{one.encode_name: self._type(one.type) for one in found.fields})
        return {**made, KEEP: True} if found.cls.__name__ in self._open else made


def _plain(found: inspect.Type) -> Schema:
    if isinstance(found, inspect.LiteralType):
        return {"type": "string", "enum": list(found.values)}
    for kind, name in (
        (inspect.StrType, "string"),
        (inspect.IntType, "integer"),
        (inspect.BoolType, "boolean"),
    ):
        if isinstance(found, kind):
            return {"type": name, **_limits(found, _LIMITS)}
    raise TypeError(f"{found}: no schema is known for it")


def _limits(found: inspect.Type, names: Mapping[str, str]) -> dict[str, Any]:
    values = ((told, getattr(found, name, None)) for name, told in names.items())
    return {told: value for told, value in values if value is not None}
