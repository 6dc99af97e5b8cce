"""The types of objects: of the built-in ones from Kubernetes' own OpenAPI, of custom ones from their schema."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.apiserver.errors import Obj, bad_request

DEFINITIONS = "kubernetes-json-schema/v1.36.0-local/_definitions.json"


class Type:
    """The type of one value. Attributes are read lazily: the types of Kubernetes refer to themselves."""

    def __init__(self, schema: Obj, *, custom: bool = False) -> None:
        self.custom = custom
        self.schema = schema if custom else _resolved(schema)

    @cached_property
    def name(self) -> str:
        """object, array, string, integer, number, boolean, or any."""
        if self.schema.get("x-kubernetes-int-or-string") or "int-or-string" in str(self.schema.get("format")):
            return "int-or-string"
        kind = self.schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "any")
        if kind is None:
            kind = "object" if "properties" in self.schema else "any"
        return str(kind)

    @cached_property
    def properties(self) -> dict[str, Type]:
        """The fields of a struct."""
        return {key: self._made(value) for key, value in self.schema.get("properties", {}).items()}

    @cached_property
    def additional(self) -> Type | None:
        """The values of a map."""
        found = self.schema.get("additionalProperties")
        return self._made(found) if isinstance(found, dict) else None

    @cached_property
    def items(self) -> Type | None:
        """The items of a list."""
        found = self.schema.get("items")
        return self._made(found) if isinstance(found, dict) else None

    @property
    def required(self) -> list[str]:
        """Fields that must be there."""
        return list(self.schema.get("required", ()))

    @property
    def is_struct(self) -> bool:
        """Whether its fields are known."""
        return bool(self.properties)

    @property
    def preserves(self) -> bool:
        """Whether unknown fields are preserved."""
        return bool(self.schema.get("x-kubernetes-preserve-unknown-fields"))

    @property
    def embedded(self) -> bool:
        """Whether it is an object with kind and metadata of its own."""
        return bool(self.schema.get("x-kubernetes-embedded-resource"))

    @property
    def list_keys(self) -> list[str] | None:
        """The keys of an associative list; an empty list for a set; None for an atomic one."""
        kind = self.schema.get("x-kubernetes-list-type")
        if kind == "map":
            return list(self.schema["x-kubernetes-list-map-keys"])
        return [] if kind == "set" else None

    @property
    def patch_key(self) -> str | None:
        """The merge key of strategic patches; empty for a merged list of scalars; None for none."""
        if "merge" not in str(self.schema.get("x-kubernetes-patch-strategy", "")).split(","):
            return None
        return str(self.schema.get("x-kubernetes-patch-merge-key", ""))

    def field(self, name: str) -> Type:
        """The type of a field; of an undeclared one, anything."""
        return self.properties.get(name) or self.additional or UNTYPED

    def _made(self, schema: Obj) -> Type:
        return Type(schema, custom=self.custom)


UNTYPED = Type({}, custom=True)


@cache
def _definitions() -> Obj:
    import kubernetes_validate

    found = Path(kubernetes_validate.__path__[0]) / DEFINITIONS
    definitions: Obj = json.loads(found.read_bytes())["$defs"]
    return definitions


def _resolved(schema: Obj) -> Obj:
    if reference := schema.get("$ref"):
        around = {key: value for key, value in schema.items() if key.startswith(("x-", "description"))}
        name = reference.removeprefix("#/$defs/")
        return {**_definitions()[name], **around, "$name": name}
    if "oneOf" in schema and "$ref" in str(schema["oneOf"]):
        return _resolved({**next(one for one in schema["oneOf"] if "$ref" in one), **schema, "oneOf": ()})
    return schema


@cache
def builtin_type(definition: str) -> Type:
    """The type of a built-in kind, such as ``io.k8s.api.core.v1.Pod``."""
    return Type({"$ref": f"#/$defs/{definition}"})


METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def custom_type(schema: Obj) -> Type:
    """The type of a custom resource, with the metadata everything has."""
    found = Type(schema, custom=True)
    metadata = builtin_type(METADATA)
    text = Type({"type": "string"}, custom=True)
    found.__dict__["properties"] = {
        **found.properties,
        "apiVersion": text,
        "kind": text,
        "metadata": metadata,
    }
    return found


_WANTED = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
_OMITTED_FALSE = frozenset(
    {
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "unschedulable",
        "readOnly",
        "stdin",
        "stdinOnce",
        "tty",
        "publishNotReadyAddresses",
        "preserveUnknownFields",
        "deprecated",
        "disabled",
    }
)
_OMITTED_ZERO = frozenset({"hostPort", "nodePort", "healthCheckNodePort", "initialDelaySeconds", "priority_"})
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)")
_POINTERS = frozenset({"holderIdentity", "storageClassName", "ingressClassName", "appProtocol"})
"""Texts that are stored even if empty."""


class Decoded(NamedTuple):
    """An object, and the fields that were dropped from it."""

    obj: Obj
    unknown: list[str]


class _MismatchError(Exception):
    pass


def decode(value: Obj, kind: Type, name: str, version: str) -> Decoded:
    """Typed as a built-in kind. Raises StatusError 400."""
    unknown: list[str] = []
    try:
        made = _decoded(value, kind, "", unknown)
    except _MismatchError as error:
        raise bad_request(f'{name} in version "{version}" cannot be handled as a {name}: {error}') from error
    return Decoded(made if isinstance(made, dict) else {}, unknown)


def _decoded(value: Any, kind: Type, at: str, unknown: list[str]) -> Any:
    if value is None:
        return None
    if kind.name == "object" or kind.is_struct:
        if not isinstance(value, dict):
            raise _MismatchError(f"{at}: cannot unmarshal {type(value).__name__} as object")
        return _decoded_object(value, kind, at, unknown)
    if kind.name == "array":
        if not isinstance(value, list):
            raise _MismatchError(f"{at}: cannot unmarshal {type(value).__name__} as array")
        of = kind.items
        if of is None:
            return value
        return [_decoded(one, of, f"{at}[{n}]", unknown) for n, one in enumerate(value)]
    return _decoded_scalar(value, kind, at)


def _decoded_scalar(value: Any, kind: Type, at: str) -> Any:
    wanted = _WANTED.get(kind.name)
    if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        if (
            kind.name == "string"
            and isinstance(value, (int, float))
            and "Quantity" in str(kind.schema.get("description", ""))[:60]
        ):
            return str(value)
        if not (kind.name == "string" and "oneOf" in kind.schema):
            raise _MismatchError(f"{at}: cannot unmarshal {type(value).__name__} as {kind.name}")
    if kind.schema.get("format") == "date-time" and value:
        return _moment(str(value), micro=str(kind.schema.get("$name", "")).endswith("MicroTime"))
    return value


def _moment(text: str, *, micro: bool) -> str:
    """A time as it is stored; those with fractions have six digits. Raises _MismatchError."""
    found = _TIME.fullmatch(text)
    if found is None or (micro and len(found[2] or "") != 7):
        raise _MismatchError(f'cannot parse time "{text}"{" with six digits" if micro else ""}')
    then = datetime.fromisoformat(text.replace("Z", "+00:00")[:19] + found[3].replace("Z", "+00:00"))
    return then.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") + (found[2] if micro else "") + "Z"


def _decoded_object(value: Obj, kind: Type, at: str, unknown: list[str]) -> Obj:
    made: Obj = {}
    for name, one in value.items():
        path = f"{at}.{name}" if at else name
        if kind.is_struct and name not in kind.properties:
            unknown.append(path)
            continue
        of = kind.field(name)
        found = _decoded(one, of, path, unknown)
        if kind.is_struct and _omitted(name, found, of, kind):
            continue
        if found is None and not kind.is_struct:
            found = ""
        made[name] = found
    return made


def _omitted(name: str, value: Any, of: Type, parent: Type) -> bool:
    if value is None:
        return name not in parent.required or name == "metadata"
    if value is False:
        return name in _OMITTED_FALSE
    if value == 0:
        return name in _OMITTED_ZERO
    if name in parent.required:
        return False
    if value == "":
        return name not in _POINTERS
    return (value == [] and of.name == "array") or (value == {} and of.additional is not None)
