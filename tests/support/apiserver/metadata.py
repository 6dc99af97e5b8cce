"""What is wrong with metadata.

Gives: metadata_errors, metadata_update_errors.
Source: k8s.io/apimachinery/pkg/api/validation/objectmeta.go.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid, required
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.names import label_value_problem, qualified_name_problem

MAX_ANNOTATIONS = 256 * 1024
KNOWN_FINALIZERS = {"orphan", "foregroundDeletion", "kubernetes"}


def metadata_errors(obj: Obj, kind: Kind) -> list[FieldError]:
    """Of an object about to be stored."""
    metadata = obj["metadata"]
    found: list[FieldError] = []
    prefix = metadata.get("generateName", "")
    masked = prefix[:-1] + "a" if prefix.endswith("-") else prefix
    if prefix and (problem := kind.strategy.name_problem(masked)):
        found.append(invalid("metadata.generateName", prefix, problem))
    name = metadata.get("name", "")
    if not name:
        found.append(required("metadata.name", "name or generateName is required"))
    elif problem := kind.strategy.name_problem(name):
        found.append(invalid("metadata.name", name, problem))
    found += _owner_errors(metadata.get("ownerReferences") or [])
    found += _finalizer_errors(metadata.get("finalizers") or [])
    found += label_errors(metadata.get("labels") or {}, "metadata.labels")
    return found + _annotation_errors(metadata.get("annotations") or {})


def label_errors(labels: Mapping[str, str], at: str) -> list[FieldError]:
    """Of labels, wherever they stand."""
    found = []
    for key, value in labels.items():
        if problem := qualified_name_problem(key):
            found.append(invalid(at, key, problem))
        if problem := label_value_problem(value):
            found.append(invalid(at, value, problem))
    return found


def _annotation_errors(annotations: Mapping[str, str]) -> list[FieldError]:
    found = [
        invalid("metadata.annotations", key, problem)
        for key in annotations
        if (problem := qualified_name_problem(key.lower()))
    ]
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > MAX_ANNOTATIONS:
        found.append(
            FieldError("toolong", "metadata.annotations", f"may not be more than {MAX_ANNOTATIONS} bytes")
        )
    return found


def _finalizer_errors(finalizers: list[str]) -> list[FieldError]:
    found = []
    for number, one in enumerate(finalizers):
        if problem := qualified_name_problem(one):
            found.append(invalid("metadata.finalizers", one, problem))
        elif "/" not in one and one not in KNOWN_FINALIZERS:
            why = "name is neither a standard finalizer name nor is it fully qualified"
            found.append(invalid(f"metadata.finalizers[{number}]", one, why))
    return found


def _owner_errors(owners: list[Obj]) -> list[FieldError]:
    found = []
    for one in owners:
        for name in ("apiVersion", "kind", "name", "uid"):
            if not one.get(name):
                what = "version must not be empty" if name == "apiVersion" else "must not be empty"
                found.append(invalid(f"metadata.ownerReferences.{name}", one.get(name, ""), what))
    controllers = [one for one in owners if one.get("controller")]
    if len(controllers) > 1:
        first, second = controllers[:2]
        why = (
            'Only one reference can have Controller set to true. Found "true" in references for'
            f" {first['kind']}/{first['name']} and {second['kind']}/{second['name']}"
        )
        found.append(invalid("metadata.ownerReferences", owners, why))
    return found


def metadata_update_errors(new: Obj, old: Obj) -> list[FieldError]:
    """Of a change."""
    found = []
    after, before = new["metadata"], old["metadata"]
    if before.get("deletionTimestamp"):
        added = [one for one in after.get("finalizers") or () if one not in (before.get("finalizers") or ())]
        if added:
            shown = "[]string{" + ", ".join(f'"{one}"' for one in added) + "}"
            why = (
                f"no new finalizers can be added if the object is being deleted, found new finalizers {shown}"
            )
            found.append(forbidden("metadata.finalizers", why))
    for name in ("uid",):
        if after.get(name) != before.get(name):
            found += [invalid(f"metadata.{name}", after.get(name), "field is immutable")] * 1
    return found
