"""Custom resource definitions: their life, from accepted names to the last instance.

Gives: DefinitionStrategy, Definitions.
Source: k8s.io/apiextensions-apiserver/pkg/controller/{status,establish,finalizer}.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.apiserver.call import now
from tests.support.apiserver.crd_errors import definition_errors, stored_errors
from tests.support.apiserver.errors import FieldError, Obj, Resource
from tests.support.apiserver.kinds import Kind, Strategy, version_order
from tests.support.apiserver.managed import Manager, after_update, managers_of, with_managers
from tests.support.apiserver.rules import changed
from tests.support.apiserver.types import Type, custom_type

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

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
    resets = (("f:status",),)

    def defaults(self, obj: Obj) -> None:
        spec = obj.get("spec") or {}
        names = spec.get("names") or {}
        if kind := names.get("kind"):
            names.setdefault("singular", kind.lower())
            names.setdefault("listKind", f"{kind}List")
        spec.setdefault("conversion", {"strategy": "None"})
        for version in spec.get("versions") or ():
            for column in version.get("additionalPrinterColumns") or ():
                if not column.get("priority"):
                    column.pop("priority", None)

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
        server.definitions.gone(obj)

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
        """Resources whose storage has yet to be made: their first request is refused with 429."""

    def changed(self, obj: Obj) -> None:
        """A definition was written."""
        if obj["metadata"].get("deletionTimestamp"):
            self._later(self._finish(obj["metadata"]["name"]))
        elif not obj["status"].get("conditions"):
            self._later(self._accept(obj["metadata"]["name"]))
        elif _is(obj, "Established"):
            self._serve(obj)

    def gone(self, obj: Obj) -> None:
        """A definition is gone: so is its resource."""
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
        accepted, reason, message = self._accepted(obj)
        good = not message
        names = _condition("NamesAccepted", "True", "NoConflicts", "no conflicts found")
        established = _condition("Established", "False", "Installing", "the initial names have been accepted")
        if not good:
            names = _condition("NamesAccepted", "False", reason, message)
            established = _condition("Established", "False", "NotAccepted", "not all names are accepted")
        obj = self._write(obj, {"conditions": [names, established], "acceptedNames": accepted})
        if not good:
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
        """The names nobody else has; the reason and the message when some are taken."""
        group, wanted = obj["spec"]["group"], obj["spec"]["names"]
        taken_names: set[str] = set()
        taken_kinds: set[str] = set()
        for other in self._server.store.of(CRDS).objects.values():
            if other["metadata"]["name"] == obj["metadata"]["name"] or other["spec"]["group"] != group:
                continue
            held = other["status"].get("acceptedNames") or {}
            taken_names |= {held.get("plural", ""), held.get("singular", ""), *(held.get("shortNames") or ())}
            taken_kinds |= {held.get("kind", ""), held.get("listKind", "")}
        accepted: Obj = {}
        reason = message = ""
        for name, taken in (
            ("plural", taken_names),
            ("singular", taken_names),
            ("kind", taken_kinds),
            ("listKind", taken_kinds),
        ):
            value = wanted.get(name, "")
            if value and value in taken:
                reason, message = f"{name[0].upper()}{name[1:]}Conflict", f'"{value}" is already in use'
            elif value:
                accepted[name] = value
        clashes = [one for one in wanted.get("shortNames") or () if one in taken_names]
        if clashes:
            reason, message = "ShortNamesConflict", f'"{clashes[0]}" is already in use'
        elif wanted.get("shortNames"):
            accepted["shortNames"] = wanted["shortNames"]
        if wanted.get("categories"):
            accepted["categories"] = wanted["categories"]
        accepted.setdefault("kind", "")
        return accepted, reason, message

    def _write(self, obj: Obj, status: Obj) -> Obj:
        kind = self._server.kinds.storing(CRDS)
        new = {**obj, "status": {**obj["status"], **status}}
        who = Manager("kube-apiserver", "Update", kind.api_version, "status")
        managed = after_update(
            obj, new, kind.type, managers_of(obj), who, now(), (("f:spec",), ("f:metadata",))
        )
        return self._server.store.put(CRDS, ("", obj["metadata"]["name"]), with_managers(new, managed))

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
        for key, one in list(collection.objects.items()):
            if one["metadata"].get("finalizers"):
                metadata = {**one["metadata"], "deletionTimestamp": now(), "deletionGracePeriodSeconds": 0}
                if "generation" in metadata:
                    metadata["generation"] += 1
                self._server.store.put(resource, key, {**one, "metadata": metadata})
            else:
                self._server.store.delete(resource, key)
        while collection.objects:
            await collection.changed.wait()
        if (left := self._get(name)) is not None:
            gone = self._server.store.delete(CRDS, ("", name), left)
            self.gone(gone)


def _is(obj: Obj, kind: str) -> bool:
    conditions = obj["status"].get("conditions") or ()
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _kind(spec: Obj, version: Obj, storage: Resource) -> Kind:
    names = spec["names"]
    schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
    found: Type = custom_type(schema)
    subresources = {}
    for name in version.get("subresources") or ():
        subresources[name] = {
            "name": f"{names['plural']}/{name}",
            "singularName": "",
            "namespaced": spec["scope"] == "Namespaced",
            "kind": names["kind"],
            "verbs": ["get", "patch", "update"],
        }
    return Kind(
        spec["group"],
        version["name"],
        names["plural"],
        names["singular"],
        names["kind"],
        spec["scope"] == "Namespaced",
        ALL_VERBS,
        found,
        CUSTOM,
        tuple(names.get("shortNames") or ()),
        tuple(names.get("categories") or ()),
        subresources,
        storage,
        version,
        names["listKind"],
    )


class _CustomStrategy(Strategy):
    unconditional = False


CUSTOM = _CustomStrategy()
