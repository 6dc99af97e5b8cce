"""Custom resource definitions: what is wrong with one, and their life, from accepted names to the last instance.

Source: k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation, pkg/controller/{status,establish,finalizer}.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    Resource,
    forbidden,
    invalid,
    required,
    unsupported,
)
from tests.support.apiserver.kinds import Call, Kind, Strategy, now, version_order
from tests.support.apiserver.rules import changed, rfc1035_problem
from tests.support.apiserver.structural import schema_errors
from tests.support.apiserver.types import Type, custom_type

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

TYPES = ("array", "boolean", "integer", "number", "object", "string")
COLUMN_TYPES = ("boolean", "date", "integer", "number", "string")
PROTECTED = ("k8s.io", "kubernetes.io")
APPROVED = "api-approved.kubernetes.io"


def definition_errors(obj: Obj) -> list[FieldError]:
    """Of a definition about to be stored."""
    return [*_own_errors(obj), *_version_errors(obj["spec"])]


def _own_errors(obj: Obj) -> Iterator[FieldError]:
    spec, metadata = obj["spec"], obj["metadata"]
    names, group = spec.get("names") or {}, spec.get("group", "")
    if metadata.get("name", "") != f"{names.get('plural', '')}.{group}":
        why = 'must be spec.names.plural+"."+spec.group'
        yield invalid("metadata.name", metadata.get("name", ""), why)
    protected = any(f".{group}".endswith(f".{one}") for one in PROTECTED)
    if protected and APPROVED not in (metadata.get("annotations") or {}):
        yield required(f"metadata.annotations[{APPROVED}]", "protected groups must have it")
    if spec.get("scope") not in {"Cluster", "Namespaced"}:
        yield unsupported("spec.scope", spec.get("scope", ""), ["Cluster", "Namespaced"])
    if spec.get("preserveUnknownFields"):
        yield invalid("spec.preserveUnknownFields", True, "cannot set to true")
    for one in ("plural", "singular", "kind", "listKind"):
        if not names.get(one):
            yield required(f"spec.names.{one}")


def stored_errors(obj: Obj) -> list[FieldError]:
    """Of versions that objects were stored in: they remain until these are migrated."""
    known = {one.get("name") for one in obj["spec"].get("versions") or ()}
    return [
        invalid(
            f"status.storedVersions[{number}]", one, "must remain in spec.versions: objects are stored in it"
        )
        for number, one in enumerate(obj["status"].get("storedVersions") or ())
        if one not in known
    ]


def _version_errors(spec: Obj) -> Iterator[FieldError]:
    versions = spec.get("versions") or []
    names = [one.get("name", "") for one in versions]
    single = len(versions) == 1
    for number, version in enumerate(versions):
        at = f"spec.versions[{number}]"
        if problem := rfc1035_problem(version.get("name", "")):
            for field in (f"{at}.name", *(["spec.version"] if single else [])):
                yield invalid(field, version.get("name", ""), problem)
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            yield required(f"{at}.schema.openAPIV3Schema")
            continue
        yield from _root_errors(
            schema, "spec.validation.openAPIV3Schema" if single else f"{at}.schema.openAPIV3Schema"
        )
        columns = f"{'spec' if single else at}.additionalPrinterColumns"
        for n, column in enumerate(version.get("additionalPrinterColumns") or ()):
            if column.get("type") not in COLUMN_TYPES:
                yield invalid(
                    f"{columns}[{n}].type", column.get("type", ""), f"must be one of {COLUMN_TYPES}"
                )
            if not str(column.get("jsonPath", "")).startswith("."):
                yield invalid(f"{columns}[{n}].JSONPath", column.get("jsonPath", ""), "must start with .")
    if len(set(names)) < len(names):
        yield invalid("spec.versions", names, "must contain unique version names")
    storing = [one for one in versions if one.get("storage")]
    if len(storing) != 1:
        yield invalid("spec.versions", names, "must have exactly one version marked as storage version")
    if not storing:
        yield invalid("status.storedVersions", None, "must have at least one stored version")


def _root_errors(schema: Obj, at: str) -> Iterator[FieldError]:
    if not schema.get("type"):
        yield required(f"{at}.type", "must not be empty at the root")
        return
    metadata = schema.get("properties", {}).get("metadata", {})
    if set(metadata.get("properties") or ()) - {"name", "generateName"}:
        why = "must not specify anything other than name and generateName"
        yield forbidden(f"{at}.properties[metadata]", why)
    yield from _schema_errors(schema, at)


def _schema_errors(schema: Obj, at: str) -> list[FieldError]:
    found = [*_keyword_errors(schema, at), *_list_errors(schema, at)]
    for name, one in (schema.get("properties") or {}).items():
        where = f"{at}.properties[{name}]"
        if _untyped(one):
            found.append(required(f"{where}.type", "must not be empty for specified object fields"))
        found += _schema_errors(one, where)
    if isinstance(of := schema.get("additionalProperties"), dict):
        found += _schema_errors(of, f"{at}.additionalProperties")
    if isinstance(of := schema.get("items"), dict):
        if _untyped(of):
            found.append(required(f"{at}.items.type", "must not be empty for specified array items"))
        found += _schema_errors(of, f"{at}.items")
    if "default" in schema and not found:
        wrong = schema_errors(schema["default"], Type(schema, custom=True), "")
        found += [one._replace(field=f"{at}.default") for one in wrong]
    return found


def _untyped(schema: Obj) -> bool:
    marks = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "$ref")
    return not schema.get("type") and not any(schema.get(one) for one in marks)


def _keyword_errors(schema: Obj, at: str) -> Iterator[FieldError]:
    kind, items = schema.get("type"), schema.get("items")
    if kind and kind not in TYPES:
        yield unsupported(f"{at}.type", kind, TYPES)
    for wrong, field, why in (
        ("$ref" in schema, "$ref", "$ref is not supported"),
        (schema.get("uniqueItems"), "uniqueItems", "uniqueItems cannot be set to true"),
        (
            schema.get("properties") and schema.get("additionalProperties") is not None,
            "additionalProperties",
            "additionalProperties and properties are mutual exclusive",
        ),
        (isinstance(items, list), "items", "items must be a schema object and not an array"),
    ):
        if wrong:
            yield forbidden(f"{at}.{field}", why)
    if kind == "array" and items is None:
        yield required(f"{at}.items", "must be specified")
    if not _is_pattern(pattern := schema.get("pattern", "")):
        yield invalid(f"{at}.pattern", pattern, "must be a valid regular expression")
    if not schema.get("x-kubernetes-int-or-string"):
        for word in ("anyOf", "oneOf", "allOf"):
            for number, one in enumerate(schema.get(word) or ()):
                if one.get("type"):
                    yield forbidden(f"{at}.{word}[{number}].type", "must be empty to be structural")


def _is_pattern(text: Any) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _list_errors(schema: Obj, at: str) -> Iterator[FieldError]:
    if schema.get("x-kubernetes-list-type") != "map":
        return
    keys, items = schema.get("x-kubernetes-list-map-keys"), schema.get("items") or {}
    if not keys:
        yield required(
            f"{at}.x-kubernetes-list-map-keys", "must not be empty if x-kubernetes-list-type is map"
        )
    for key in keys or ():
        of = (items.get("properties") or {}).get(key, {})
        if key not in (items.get("required") or ()) and "default" not in of:
            yield required(f"{at}.items.properties[{key}].default", "a key has a default or is required")


CRDS = Resource("apiextensions.k8s.io", "customresourcedefinitions")
FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
ALL_VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")


class DefinitionStrategy(Strategy):
    """The kind CustomResourceDefinition."""

    empty: ClassVar[Obj] = {
        "spec": {"group": "", "names": {"plural": "", "kind": ""}, "scope": "", "versions": None},
        "status": {"conditions": None, "acceptedNames": {"plural": "", "kind": ""}, "storedVersions": None},
    }
    generations = True
    answers_object = True

    def defaults(self, obj: Obj) -> None:
        spec = obj.get("spec") or {}
        names = spec.get("names") or {}
        if kind := names.get("kind"):
            names.setdefault("singular", kind.lower())
            names.setdefault("listKind", f"{kind}List")
        spec.setdefault("conversion", {"strategy": "None"})

    def prepare_create(self, obj: Obj, server: Any) -> None:
        stored = [one["name"] for one in obj["spec"]["versions"] if one.get("storage")]
        obj["status"] = {
            "conditions": None,
            "acceptedNames": {"plural": "", "kind": ""},
            "storedVersions": stored,
        }

    def prepare_update(self, obj: Obj, old: Obj, server: Any) -> None:
        stored = obj["status"].get("storedVersions") or []
        new = [one["name"] for one in obj["spec"].get("versions") or () if one.get("storage")]
        obj["status"]["storedVersions"] = [*stored, *(one for one in new if one not in stored)]

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        return definition_errors(obj)

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        fixed = ("spec.names.kind", "spec.scope") if _is(old, "Established") else ()
        return changed(obj, old, fixed) + stored_errors(obj) + definition_errors(obj)

    def grace(self, obj: Obj, options: Obj) -> int:
        return 0

    def stored(self, obj: Obj, server: ApiServer) -> None:
        server.definitions.changed(obj)

    def deleted(self, obj: Obj, server: ApiServer) -> None:
        server.definitions.remove(obj)

    def delete_finalizers(self, obj: Obj) -> list[str]:
        return [FINALIZER]

    def dying(self, obj: Obj) -> None:
        obj["metadata"].pop("deletionGracePeriodSeconds", None)
        obj["metadata"]["generation"] = obj["metadata"].get("generation", 2) - 1
        conditions = [one for one in obj["status"].get("conditions") or () if one["type"] != "Terminating"]
        conditions.append(
            _condition(
                "Terminating",
                "True",
                "InstanceDeletionPending",
                "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
            )
        )
        obj["status"] = {**obj["status"], "conditions": conditions}


def _condition(kind: str, status: str, reason: str, message: str) -> Obj:
    return {"type": kind, "status": status, "lastTransitionTime": now(), "reason": reason, "message": message}


class Definitions:
    """Serves what the definitions in the store say."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.fresh: set[tuple[str, str]] = set()
        """Resources with storage that has yet to be made: their first request is refused with 429."""

    def changed(self, obj: Obj) -> None:
        """A definition was written."""
        if obj["metadata"].get("deletionTimestamp"):
            self._later(self._finish(obj["metadata"]["name"]))
        elif not obj["status"].get("conditions"):
            self._later(self._accept(obj["metadata"]["name"]))
        elif _is(obj, "Established"):
            self._serve(obj)

    def remove(self, obj: Obj) -> None:
        """A definition is removed: so is its resource."""
        spec = obj["spec"]
        self._server.kinds.remove(spec["group"], spec["names"]["plural"])
        self._server.store.drop(Resource(spec["group"], spec["names"]["plural"]))
        for other in list(self._server.store.of(CRDS).objects.values()):
            if other["spec"]["group"] == spec["group"] and not _is(other, "NamesAccepted"):
                self._later(self._accept(other["metadata"]["name"]))

    def restarted(self) -> None:
        """After a restart every storage is made anew."""
        for obj in self._server.store.of(CRDS).objects.values():
            self.fresh.add((obj["spec"]["group"], obj["spec"]["names"]["plural"]))

    async def stop(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _get(self, name: str) -> Obj | None:
        return self._server.store.get(CRDS, ("", name))

    async def _accept(self, name: str) -> None:
        await asyncio.sleep(self._server.crd_delay)
        if (obj := self._get(name)) is None:
            return
        accepted, taken, why = self._accepted(obj)
        names = _condition("NamesAccepted", "True", "NoConflicts", "no conflicts found")
        established = _condition("Established", "False", "Installing", "the initial names have been accepted")
        if taken:
            names = _condition("NamesAccepted", "False", taken, why)
            established = _condition("Established", "False", "NotAccepted", "not all names are accepted")
        obj = self._write(obj, {"conditions": [names, established], "acceptedNames": accepted})
        if taken:
            return
        await asyncio.sleep(self._server.crd_delay)
        if (obj_now := self._get(name)) is None or obj_now["metadata"].get("deletionTimestamp"):
            return
        established = _condition(
            "Established", "True", "InitialNamesAccepted", "the initial names have been accepted"
        )
        obj = self._write(obj_now, {"conditions": [names, established], "acceptedNames": accepted})
        await asyncio.sleep(self._server.crd_delay)
        self._serve(obj)

    def _accepted(self, obj: Obj) -> tuple[Obj, str, str]:
        """The names that are free; the reason and the message of a condition when some are taken."""
        group, wanted = obj["spec"]["group"], obj["spec"]["names"]
        others = [
            one["status"].get("acceptedNames") or {}
            for one in self._server.store.of(CRDS).objects.values()
            if one["metadata"]["name"] != obj["metadata"]["name"] and one["spec"]["group"] == group
        ]
        names = {one.get(field) for one in others for field in ("plural", "singular")}
        names |= {short for one in others for short in one.get("shortNames") or ()}
        kinds = {one.get(field) for one in others for field in ("kind", "listKind")}
        accepted: Obj = {"kind": ""}
        reason = message = ""
        for field, taken in (("plural", names), ("singular", names), ("kind", kinds), ("listKind", kinds)):
            if (value := wanted.get(field)) in taken and value:
                reason, message = f"{field[0].upper()}{field[1:]}Conflict", f'"{value}" is already in use'
            elif value:
                accepted[field] = value
        for field in ("shortNames", "categories"):
            if field == "shortNames" and (held := sorted(set(wanted.get(field) or ()) & names)):
                reason, message = "ShortNamesConflict", f'"{held[0]}" is already in use'
            elif wanted.get(field):
                accepted[field] = wanted[field]
        return accepted, reason, message

    def _write(self, obj: Obj, status: Obj) -> Obj:
        new = {**obj, "status": {**obj["status"], **status}}
        return self._server.store.put(CRDS, ("", obj["metadata"]["name"]), new)

    def _serve(self, obj: Obj) -> None:
        spec = obj["spec"]
        names, group = spec["names"], spec["group"]
        storage = Resource(group, names["plural"])
        self._server.store.of(storage)
        known = self._server.kinds
        before = {
            kind.version for kind in known.all() if (kind.group, kind.plural) == (group, names["plural"])
        }
        if not before:
            self.fresh.add((group, names["plural"]))
        served = sorted(
            (one for one in spec["versions"] if one.get("served")), key=lambda one: version_order(one["name"])
        )
        known.remove(group, names["plural"])
        for version in served:
            known.add(_kind(spec, version, storage))

    async def _finish(self, name: str) -> None:
        """Delete the instances, then the definition."""
        await asyncio.sleep(self._server.crd_delay)
        if (obj := self._get(name)) is None:
            return
        spec = obj["spec"]
        resource = Resource(spec["group"], spec["names"]["plural"])
        message = "CustomResource deletion is in progress"
        conditions = [
            {**one, "reason": "InstanceDeletionInProgress", "message": message}
            if one["type"] == "Terminating"
            else one
            for one in obj["status"].get("conditions") or ()
        ]
        self._write(obj, {"conditions": conditions})
        collection = self._server.store.of(resource)
        kind = _kind(spec, spec["versions"][0], resource)
        for key in list(collection.objects):
            self._server.writes.delete(Call(kind, *key), {})
        while collection.objects:
            await collection.changed.wait()
        if (left := self._get(name)) is not None:
            removed = self._server.store.delete(CRDS, ("", name), left)
            self.remove(removed)


def _is(obj: Obj, kind: str) -> bool:
    conditions = obj["status"].get("conditions") or ()
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _kind(spec: Obj, version: Obj, storage: Resource) -> Kind:
    names, namespaced = spec["names"], spec["scope"] == "Namespaced"
    of: Obj = {"singularName": "", "namespaced": namespaced, "kind": names["kind"]}
    return Kind(
        group=spec["group"],
        version=version["name"],
        plural=names["plural"],
        singular=names["singular"],
        kind=names["kind"],
        namespaced=namespaced,
        verbs=ALL_VERBS,
        type=custom_type((version.get("schema") or {}).get("openAPIV3Schema") or {}),
        strategy=Strategy(),
        short=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        subresources={
            one: {"name": f"{names['plural']}/{one}", **of, "verbs": ["get", "patch", "update"]}
            for one in version.get("subresources") or ()
        },
        storage=storage,
        custom=version,
        list_kind=names["listKind"],
    )
