"""The types of objects: of the built-in ones from Kubernetes' own OpenAPI, of custom ones from their schema.

Gives: Type, builtin_type, custom_type, METADATA. Field ownership, merging and decoding walk along them.
"""

from __future__ import annotations

import json
from functools import cache, cached_property
from pathlib import Path

from tests.support.apiserver.errors import Obj

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
        """Whether unknown fields are kept."""
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
    def atomic(self) -> bool:
        """Whether a map or struct is owned as a whole."""
        return self.schema.get("x-kubernetes-map-type") == "atomic"

    @property
    def patch_key(self) -> str | None:
        """The merge key of strategic patches; empty for a merged list of scalars; None for none."""
        if "merge" not in str(self.schema.get("x-kubernetes-patch-strategy", "")).split(","):
            return None
        return str(self.schema.get("x-kubernetes-patch-merge-key", ""))

    @property
    def patch_retains_keys(self) -> bool:
        """Whether a strategic patch of this union tells its keys."""
        return "retainKeys" in str(self.schema.get("x-kubernetes-patch-strategy", ""))

    def field(self, name: str) -> Type:
        """The type of a field; of one nobody declared, whatever comes."""
        return self.properties.get(name) or self.additional or UNTYPED

    def declares(self, name: str) -> bool:
        """Whether there may be a field of this name."""
        return name in self.properties or self.additional is not None or not self.is_struct or self.preserves

    def key_default(self, name: str) -> object:
        """The default of a key of an associative list's item."""
        found = self.field(name).schema.get("default")
        if found is None and name == "protocol":
            return "TCP"
        return found

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
