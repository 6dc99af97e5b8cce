"""What is wrong with a custom resource definition.

Gives: definition_errors, stored_errors.
Source: k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation.
"""

from __future__ import annotations

import re
from typing import Any

from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid, required, unsupported
from tests.support.apiserver.names import rfc1035_problem
from tests.support.apiserver.structural import schema_errors
from tests.support.apiserver.types import Type

TYPES = ("array", "boolean", "integer", "number", "object", "string")
PROTECTED = ("k8s.io", "kubernetes.io")


def definition_errors(obj: Obj) -> list[FieldError]:
    """Of a definition about to be stored."""
    spec = obj["spec"]
    names, group = spec.get("names") or {}, spec.get("group", "")
    name = obj["metadata"].get("name", "")
    found: list[FieldError] = []
    wanted = f"{names.get('plural', '')}.{group}"
    if name != wanted:
        found.append(invalid("metadata.name", name, 'must be spec.names.plural+"."+spec.group'))
    if any(group == one or group.endswith(f".{one}") for one in PROTECTED):
        annotations = obj["metadata"].get("annotations") or {}
        if "api-approved.kubernetes.io" not in annotations:
            why = (
                'protected groups must have approval annotation "api-approved.kubernetes.io", see'
                " https://github.com/kubernetes/enhancements/pull/1111"
            )
            found.append(required("metadata.annotations[api-approved.kubernetes.io]", why))
    if spec.get("scope") not in {"Cluster", "Namespaced"}:
        found.append(unsupported("spec.scope", spec.get("scope", ""), ["Cluster", "Namespaced"]))
    if spec.get("preserveUnknownFields"):
        why = "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead"
        found.append(invalid("spec.preserveUnknownFields", True, why))
    found += [
        required(f"spec.names.{one}")
        for one in ("plural", "singular", "kind", "listKind")
        if not names.get(one)
    ]
    return found + _version_errors(spec)


def stored_errors(obj: Obj) -> list[FieldError]:
    """Of versions that objects were stored in: they remain until somebody migrates these."""
    served = {one.get("name") for one in obj["spec"].get("versions") or ()}
    why = (
        "missing from spec.versions; {0} was previously a storage version, and must remain in spec.versions until"
        " a storage migration ensures no data remains persisted in {0} and removes {0} from status.storedVersions"
    )
    return [
        invalid(f"status.storedVersions[{number}]", one, why.format(one))
        for number, one in enumerate(obj["status"].get("storedVersions") or ())
        if one not in served
    ]


def _version_errors(spec: Obj) -> list[FieldError]:
    versions = spec.get("versions") or []
    found: list[FieldError] = []
    single = len(versions) == 1
    for number, version in enumerate(versions):
        at = f"spec.versions[{number}]"
        if problem := rfc1035_problem(version.get("name", "")):
            found.append(invalid(f"{at}.name", version.get("name", ""), problem))
            if single:
                found.append(invalid("spec.version", version.get("name", ""), problem))
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            found.append(required(f"{at}.schema.openAPIV3Schema"))
            continue
        where = "spec.validation.openAPIV3Schema" if single else f"{at}.schema.openAPIV3Schema"
        found += _root_errors(schema, where)
        columns = "spec.additionalPrinterColumns" if single else f"{at}.additionalPrinterColumns"
        for n, column in enumerate(version.get("additionalPrinterColumns") or ()):
            found += _column_errors(column, f"{columns}[{n}]")
    if len({one.get("name") for one in versions}) < len(versions):
        found.append(
            invalid(
                "spec.versions", [_go_version(one) for one in versions], "must contain unique version names"
            )
        )
    storing = [one for one in versions if one.get("storage")]
    if len(storing) != 1:
        shown = [_go_version(one) for one in versions]
        found.append(
            invalid("spec.versions", shown, "must have exactly one version marked as storage version")
        )
        if not storing:
            found.append(invalid("status.storedVersions", None, "must have at least one stored version"))
    return found


def _go_version(version: Obj) -> Obj:
    return {
        "Name": version.get("name", ""),
        "Served": bool(version.get("served")),
        "Storage": bool(version.get("storage")),
        "Deprecated": False,
        "DeprecationWarning": None,
        "Schema": None,
        "Subresources": None,
        "AdditionalPrinterColumns": None,
        "SelectableFields": None,
    }


def _column_errors(column: Obj, at: str) -> list[FieldError]:
    found = []
    if column.get("type") not in {"boolean", "date", "integer", "number", "string"}:
        found.append(
            invalid(f"{at}.type", column.get("type", ""), "must be one of boolean,date,integer,number,string")
        )
    if not str(column.get("jsonPath", "")).startswith("."):
        found.append(
            invalid(
                f"{at}.JSONPath", column.get("jsonPath", ""), "must be a simple json path starting with ."
            )
        )
    return found


def _root_errors(schema: Obj, at: str) -> list[FieldError]:
    if not schema.get("type"):
        return [required(f"{at}.type", "must not be empty at the root")]
    found = []
    metadata = schema.get("properties", {}).get("metadata", {})
    if extra := set(metadata.get("properties") or ()) - {"name", "generateName"}:
        del extra
        why = (
            "must not specify anything other than name and generateName, but metadata is implicitly specified"
        )
        found.append(forbidden(f"{at}.properties[metadata]", why))
    return found + _schema_errors(schema, at, structural=True)


def _schema_errors(schema: Obj, at: str, *, structural: bool) -> list[FieldError]:
    found: list[FieldError] = []
    kind = schema.get("type")
    if kind and kind not in TYPES:
        found.append(unsupported(f"{at}.type", kind, TYPES))
    if "$ref" in schema:
        found.append(forbidden(f"{at}.$ref", "$ref is not supported"))
    if schema.get("uniqueItems"):
        why = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic"
        found.append(forbidden(f"{at}.uniqueItems", why))
    found += _pattern_errors(schema, at) + _list_errors(schema, at)
    properties = schema.get("properties") or {}
    if properties and schema.get("additionalProperties") is not None:
        why = "additionalProperties and properties are mutual exclusive"
        found.append(forbidden(f"{at}.additionalProperties", why))
    for name, one in properties.items():
        where = f"{at}.properties[{name}]"
        if structural and _untyped(one):
            found.append(required(f"{where}.type", "must not be empty for specified object fields"))
        found += _schema_errors(one, where, structural=structural)
    if isinstance(schema.get("additionalProperties"), dict):
        found += _schema_errors(
            schema["additionalProperties"], f"{at}.additionalProperties", structural=structural
        )
    found += _item_errors(schema, at, structural=structural) + _combined_errors(schema, at)
    if "default" in schema and not found:
        found += [
            one._replace(field=f"{at}.default")
            for one in schema_errors(schema["default"], Type(schema, custom=True), "")
        ]
    return found


def _untyped(schema: Obj) -> bool:
    marks = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "$ref")
    return not schema.get("type") and not any(schema.get(one) for one in marks)


def _pattern_errors(schema: Obj, at: str) -> list[FieldError]:
    pattern = schema.get("pattern")
    if pattern is None:
        return []
    try:
        re.compile(pattern)
    except re.error:
        rest = pattern[pattern.rfind("[") :] if "[" in pattern else pattern
        why = f"must be a valid regular expression, but isn't: error parsing regexp: missing closing ]: `{rest}`"
        return [invalid(f"{at}.pattern", pattern, why)]
    return []


def _list_errors(schema: Obj, at: str) -> list[FieldError]:
    if schema.get("x-kubernetes-list-type") != "map":
        return []
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys:
        why = "must not be empty if x-kubernetes-list-type is map"
        return [required(f"{at}.x-kubernetes-list-map-keys", why)]
    items = schema.get("items") or {}
    found = []
    for key in keys:
        of = (items.get("properties") or {}).get(key, {})
        if key not in (items.get("required") or ()) and "default" not in of:
            why = "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property"
            found.append(required(f"{at}.items.properties[{key}].default", why))
    return found


def _item_errors(schema: Obj, at: str, *, structural: bool) -> list[FieldError]:
    items: Any = schema.get("items")
    if isinstance(items, list):
        return [forbidden(f"{at}.items", "items must be a schema object and not an array")]
    if items is None:
        return [required(f"{at}.items", "must be specified")] if schema.get("type") == "array" else []
    found = []
    if structural and _untyped(items):
        found.append(required(f"{at}.items.type", "must not be empty for specified array items"))
    return found + _schema_errors(items, f"{at}.items", structural=structural)


def _combined_errors(schema: Obj, at: str) -> list[FieldError]:
    found = []
    allowed_types = schema.get("x-kubernetes-int-or-string")
    for word in ("anyOf", "oneOf", "allOf"):
        for number, one in enumerate(schema.get(word) or ()):
            if one.get("type") and not allowed_types:
                found.append(forbidden(f"{at}.{word}[{number}].type", "must be empty to be structural"))
    return found
