"""Whether an object may be written, and is what its kind declares: admission, decoding, defaults, validation.

Source: NamespaceLifecycle; k8s.io/apiserver/pkg/registry/rest/create.go, apiextensions-apiserver;
k8s.io/apimachinery/pkg/api/validation/objectmeta.go.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.support.apiserver import errors
from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    Resource,
    forbidden,
    invalid,
    refused,
    required,
)
from tests.support.apiserver.kinds import Call, Kind
from tests.support.apiserver.rules import (
    IMMUTABLE,
    changed,
    label_value_problem,
    qualified_name_problem,
    value_errors,
)
from tests.support.apiserver.structural import fill_defaults, prune, schema_errors
from tests.support.apiserver.types import METADATA, Type, builtin_type, decode

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

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
    found = [
        invalid(f"metadata.ownerReferences.{name}", one.get(name, ""), "must not be empty")
        for one in owners
        for name in ("apiVersion", "kind", "name", "uid")
        if not one.get(name)
    ]
    if sum(bool(one.get("controller")) for one in owners) > 1:
        why = "only one reference can have controller set to true"
        found.append(invalid("metadata.ownerReferences", owners, why))
    return found


def metadata_update_errors(new: Obj, old: Obj) -> list[FieldError]:
    """Of a change."""
    found = []
    after, before = new["metadata"], old["metadata"]
    added = set(after.get("finalizers") or ()) - set(before.get("finalizers") or ())
    if before.get("deletionTimestamp") and added:
        found.append(
            forbidden("metadata.finalizers", f"an object that is being deleted gets no more: {added}")
        )
    if after.get("uid") != before.get("uid"):
        found.append(invalid("metadata.uid", after.get("uid"), "field is immutable"))
    return found


PROTECTED_NAMESPACES = {"default", "kube-system", "kube-public"}


class Admission:
    """Refuses writes that may not be."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def create(self, call: Call, obj: Obj) -> None:
        """Raises StatusError."""
        if call.kind.namespaced:
            self._namespace(call, obj)
        if call.kind.custom is not None:
            self._definition(call, obj)

    def delete(self, call: Call, obj: Obj) -> None:
        """Raises StatusError."""
        if call.kind.plural == "namespaces" and call.name in PROTECTED_NAMESPACES:
            raise refused(call.kind.resource, call.name, "this namespace may not be deleted")

    def _namespace(self, call: Call, obj: Obj) -> None:
        found = self._server.store.get(Resource("", "namespaces"), ("", call.namespace))
        if found is None:
            raise errors.not_found(Resource("", "namespaces"), call.namespace)
        if not found["metadata"].get("deletionTimestamp"):
            return
        resource, name = call.kind.resource, obj["metadata"].get("name", "")
        why = f"unable to create new content in namespace {call.namespace} because it is being terminated"
        cause = {"reason": "NamespaceTerminating", "message": why, "field": "metadata.namespace"}
        raise refused(resource, name, why, {**resource.details(name), "causes": [cause]})

    def _definition(self, call: Call, obj: Obj) -> None:
        name = f"{call.kind.plural}.{call.kind.group}"
        found = self._server.store.get(
            Resource("apiextensions.k8s.io", "customresourcedefinitions"), ("", name)
        )
        if found is not None and found["metadata"].get("deletionTimestamp"):
            why = "create not allowed while custom resource definition is terminating"
            raise refused(call.kind.resource, obj["metadata"].get("name", ""), why)


class Validity:
    """Decodes the objects of writes and refuses invalid ones."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def typed(self, call: Call, body: Obj) -> Obj:
        """The object as its kind declares it, with defaults; warnings of what was dropped. Raises StatusError."""
        kind = call.kind
        unknown: list[str] = []
        if kind.custom is None:
            obj, unknown = decode(body, kind.type, kind.kind, kind.version)
            for name, value in kind.strategy.empty.items():
                obj.setdefault(name, copy.deepcopy(value))
            obj = {**obj, "kind": kind.kind, "apiVersion": kind.api_version}
            kind.strategy.defaults(obj)
        else:
            own = {"metadata": body.get("metadata") or {}}
            metadata, unknown = decode(own, METADATA_ONLY, kind.kind, kind.version)
            pruned = prune({key: body[key] for key in body if key != "metadata"}, kind.type, "", unknown)
            obj = {**fill_defaults(pruned, kind.type), "metadata": metadata.get("metadata", {})}
        if unknown and call.strict == "Strict":
            shown = ", ".join(f'unknown field "{one}"' for one in sorted(unknown))
            raise errors.bad_request(f"{kind.kind} cannot be handled: strict decoding error: {shown}")
        if call.strict != "Ignore":
            call.warnings += [f'unknown field "{one}"' for one in sorted(unknown)]
        return obj

    def content_errors(self, call: Call, obj: Obj, live: Obj | None = None) -> list[FieldError]:
        kind = call.kind
        if kind.custom is not None:
            found = schema_errors(obj, kind.type, "")
            if live is not None:  # what was wrong before is tolerated as long as it does not change
                before = schema_errors(live, kind.type, "")
                found = [one for one in found if one not in before]
            return found
        found = value_errors(obj, kind.resource)
        if live is None:
            return found + kind.strategy.validate(obj, self._server)
        found += changed(obj, live, IMMUTABLE.get(kind.resource, ()))
        return found + kind.strategy.validate_update(obj, live, self._server)

    def refuse_invalid(self, call: Call, wrong: list[FieldError], obj: Obj) -> None:
        if wrong:
            name = obj.get("metadata", {}).get("name", "")
            raise errors.unprocessable(call.kind.group, call.kind.kind, name, wrong)


METADATA_ONLY = Type({"type": "object"}, custom=True)
METADATA_ONLY.__dict__["properties"] = {"metadata": builtin_type(METADATA)}
