"""Create, update, patch and apply.

Gives: Writes. Source: k8s.io/apiserver/pkg/registry/generic/registry/store.go, endpoints/handlers.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.apiserver import errors
from tests.support.apiserver.call import Call, now
from tests.support.apiserver.deletes import Deletes
from tests.support.apiserver.errors import Obj, StatusError
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.managed import (
    Manager,
    Managers,
    after_update,
    apply,
    check_applied,
    managers_of,
    with_managers,
)
from tests.support.apiserver.metadata import metadata_errors, metadata_update_errors
from tests.support.apiserver.valid import Validity

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
SYSTEM_FIELDS = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink")


class Writes:
    """Changes the store as the handlers of an API server do."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._store = server.store
        self._validity = Validity(server)
        self._deletes = Deletes(server)

    # ---- create

    def create(self, call: Call, body: Obj, *, applied: Managers | None = None) -> Obj:
        """Store a new object. Raises StatusError."""
        kind, strategy = call.kind, call.kind.strategy
        self._match_namespace(call, body)
        obj = self._validity.typed(call, body)
        metadata = dict(obj.get("metadata") or {})
        if metadata.get("resourceVersion") not in {None, "", "0"}:
            raise errors.internal("resourceVersion should not be set on objects to be created")
        metadata.pop("resourceVersion", None)
        for name in SYSTEM_FIELDS:
            metadata.pop(name, None)
        if kind.namespaced:
            metadata["namespace"] = call.namespace
        else:
            metadata.pop("namespace", None)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = self._generated(kind, call.namespace, metadata["generateName"])
        obj["metadata"] = metadata
        managed = applied if applied is not None else self._managed_create(call, obj)
        strategy.admit_create(obj, self._server)
        self._server.admission.create(call, obj)
        obj["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        self._prepare_create(call, obj)
        self._validity.refuse_invalid(
            call, metadata_errors(obj, kind) + self._validity.content_errors(call, obj), obj
        )
        self._need_namespace(call)
        self._server.limits.check_size(obj)
        key = (metadata.get("namespace", ""), metadata["name"])
        existing = self._store.get(kind.storage, key)
        if existing is not None:
            dying = existing["metadata"].get("deletionTimestamp")
            prefix = "object is being deleted: " if dying else ""
            raise errors.already_exists(kind.resource, metadata["name"], prefix)
        obj = with_managers(obj, managed)
        if call.dry_run:
            return obj
        strategy.prepare_create(obj, self._server)
        stored = self._store.put(kind.storage, key, self._server.for_storage(obj, kind))
        strategy.stored(stored, self._server)
        return self._server.converted(stored, kind)

    def _prepare_create(self, call: Call, obj: Obj) -> None:
        kind = call.kind
        if kind.custom is not None:
            if kind.status:
                obj.pop("status", None)
            obj["metadata"]["generation"] = 1
        elif kind.strategy.generations:
            obj["metadata"]["generation"] = 1

    def _generated(self, kind: Kind, namespace: str, prefix: str) -> str:
        name = ""
        for _ in range(8):
            name = prefix[:58] + "".join(random.choices(ALPHABET, k=5))  # noqa: S311
            if self._store.get(kind.storage, (namespace if kind.namespaced else "", name)) is None:
                break
        return name

    def _need_namespace(self, call: Call) -> None:
        if not call.kind.namespaced:
            return
        found = self._store.get(errors.Resource("", "namespaces"), ("", call.namespace))
        if found is None:
            raise errors.not_found(errors.Resource("", "namespaces"), call.namespace)

    def delete(self, call: Call, options: Obj) -> tuple[Obj, bool]:
        """Delete an object, or begin to; it, and whether it is gone. Raises StatusError."""
        return self._deletes.delete(call, options)

    def _match_namespace(self, call: Call, body: Obj) -> None:
        given = (
            (body.get("metadata") or {}).get("namespace") if isinstance(body.get("metadata"), dict) else ""
        )
        if call.kind.namespaced and given and given != call.namespace:
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )

    # ---- update

    def update(self, call: Call, body: Obj) -> tuple[Obj, bool]:
        """Put an object in place; it, and whether it is new. Raises StatusError."""
        self._match_namespace(call, body)
        given = (body.get("metadata") or {}).get("name", "")
        if not given:
            raise errors.bad_request(
                f"the name of the object ({call.name} based on URL) was undeterminable: name must be provided"
            )
        self._match_name(call, given)
        live = self._server.live(call)
        if live is None:
            version = (body.get("metadata") or {}).get("resourceVersion")
            if not call.kind.strategy.create_on_update or call.subresource or version:
                raise errors.not_found(call.kind.resource, call.name)
            return self.create(call, body), True
        return self._replace(call, live, self._validity.typed(call, body), put=True), False

    def _match_name(self, call: Call, given: str) -> None:
        if given != call.name:
            raise errors.bad_request(
                f"the name of the object ({given}) does not match the name on the URL ({call.name})"
            )

    def patch(self, call: Call, change: Callable[[Obj], Obj]) -> Obj:
        """Change an object. Raises StatusError."""
        live = self._server.live(call)
        if live is None:
            raise errors.not_found(call.kind.resource, call.name)
        body = change(live)
        self._match_type(call, body)
        metadata = body.get("metadata") or {}
        self._match_name(call, metadata.get("name", ""))
        if call.kind.namespaced and metadata.get("namespace") != call.namespace:
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        try:
            typed = self._validity.typed(call, body, patched=True)
        except StatusError as error:
            if error.code != 400 or "json: cannot unmarshal" not in str(error):
                raise
            why = str(error).partition("handled as a ")[2].partition(": ")[2]
            raise self._bad_patch(body, why) from error
        return self._replace(call, live, typed, put=False)

    def _match_type(self, call: Call, body: Obj) -> None:
        """A patched object is what it was. Raises StatusError 422."""
        kind = call.kind
        for field, wanted in (("kind", kind.kind), ("apiVersion", kind.api_version)):
            if (given := body.get(field)) == wanted:
                continue
            if kind.custom is not None:
                wrong = errors.invalid(field, given, f"must be {wanted}")
                raise errors.unprocessable(kind.group, kind.kind, call.name, [wrong])
            why = f'no kind "{body.get("kind")}" is registered for version "{body.get("apiVersion")}"'
            raise self._bad_patch(body, why)

    def _bad_patch(self, body: Obj, why: str) -> StatusError:
        wrong = errors.invalid("patch", json.dumps(body, separators=(",", ":")), why)
        refused = errors.unprocessable("", "", "", [wrong])
        refused.body["details"].pop("kind")
        return refused

    def _replace(self, call: Call, live: Obj, new: Obj, *, put: bool, applied: Managers | None = None) -> Obj:
        kind, strategy = call.kind, call.kind.strategy
        self._check_version(call, live, new, put=put)
        metadata = self._kept_metadata(call, live, new)
        new = self._only_part(call, live, {**new, "metadata": metadata})
        managed = self._managed_update(call, live, new) if applied is None else applied
        self._server.admission.update(call, new, live)
        strategy.admit_update(new, live, self._server)
        self._validity.refuse_invalid(call, metadata_update_errors(new, live), new)
        strategy.prepare_update(new, live, self._server)
        self._count_generation(call, live, new)
        wrong = metadata_errors(new, kind) + self._validity.content_errors(call, new, live)
        self._validity.refuse_invalid(call, wrong, new)
        new = with_managers(new, managed)
        return self._store_change(call, live, new)

    def _store_change(self, call: Call, live: Obj, new: Obj) -> Obj:
        kind = call.kind
        version = live["metadata"]["resourceVersion"]
        new["metadata"]["resourceVersion"] = version
        if _same(live, new):
            return live
        if call.dry_run:
            return new
        self._server.limits.check_size(new)
        key = (new["metadata"].get("namespace", ""), call.name)
        metadata = new["metadata"]
        ended = (
            metadata.get("deletionTimestamp")
            and not metadata.get("finalizers")
            and not kind.strategy.pending(new)
        )
        stored = self._server.for_storage(new, kind)
        graceful = kind.strategy.graceful and not live["metadata"].get("finalizers")
        if ended and metadata.get("deletionGracePeriodSeconds", 0) == 0 and not graceful:
            self._deletes.remove(kind, key, self._server.for_storage(live, kind))
            return new
        put = self._store.put(kind.storage, key, stored)
        kind.strategy.stored(put, self._server)
        return self._server.converted(put, kind)

    def _check_version(self, call: Call, live: Obj, new: Obj, *, put: bool) -> None:
        given = str((new.get("metadata") or {}).get("resourceVersion") or "")
        if given in {"", "0"}:
            if put and (call.kind.custom is not None or not call.kind.strategy.unconditional):
                wrong = errors.invalid("metadata.resourceVersion", 0, "must be specified for an update")
                name = call.kind.plural if call.kind.custom else call.kind.kind
                raise errors.unprocessable(call.kind.group, name, call.name, [wrong])
        elif not given.isdigit():
            raise errors.internal(f'strconv.ParseUint: parsing "{given}": invalid syntax')
        elif given != live["metadata"]["resourceVersion"]:
            raise errors.conflict(call.kind.resource, call.name)
        uid = (new.get("metadata") or {}).get("uid")
        if put and uid and uid != live["metadata"]["uid"]:
            where = f"{call.namespace}/" if call.kind.namespaced else ""
            group = f"{call.kind.group}/" if call.kind.custom else ""
            raise errors.conflict(
                call.kind.resource,
                call.name,
                f"StorageError: invalid object, Code: 4, Key: /registry/{group}{call.kind.plural}/{where}{call.name},"
                f" ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {uid}, UID in"
                f" object meta: {live['metadata']['uid']}",
            )

    def _kept_metadata(self, call: Call, live: Obj, new: Obj) -> Obj:
        old = live["metadata"]
        made = {
            key: value
            for key, value in (new.get("metadata") or {}).items()
            if key
            not in {
                "selfLink",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "generation",
                "resourceVersion",
            }
        }
        for name in ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation"):
            if name in old:
                made[name] = old[name]
        made.setdefault("uid", old["uid"])
        if call.kind.namespaced:
            made["namespace"] = old["namespace"]
        else:
            made.pop("namespace", None)
        return made

    def _only_part(self, call: Call, live: Obj, new: Obj) -> Obj:
        """Only what this path may change: the status, or all but the status."""
        kind = call.kind
        if call.subresource == "status":
            return kind.strategy.status_update(live, new) if kind.custom is None else _status_only(live, new)
        if kind.status and "status" not in kind.strategy.status_in_main:
            new = kind.strategy.main_update(live, new, call.subresource)
            made = {key: value for key, value in new.items() if key != "status"}
            return {**made, "status": live["status"]} if "status" in live else made
        return new

    def _count_generation(self, call: Call, live: Obj, new: Obj) -> None:
        if call.kind.custom is not None:
            ignored = {"metadata", "status"} if call.kind.status else {"metadata"}
        elif call.kind.strategy.generations:
            ignored = {"metadata", "status"}
        else:
            return
        before = {key: value for key, value in live.items() if key not in ignored}
        after = {key: value for key, value in new.items() if key not in ignored}
        if before != after:
            new["metadata"]["generation"] = live["metadata"].get("generation", 0) + 1

    # ---- apply

    def apply(self, call: Call, config: Obj, *, force: bool) -> tuple[Obj, bool]:
        """Server-side apply; the object, and whether it is new. Raises StatusError."""
        kind = call.kind
        metadata = config.setdefault("metadata", {}) or {}
        config["metadata"] = metadata
        if metadata.get("managedFields") is not None:
            raise errors.bad_request("metadata.managedFields must be nil")
        metadata.setdefault("name", call.name)
        live = self._server.live(call)
        if live is None and call.subresource:
            raise errors.not_found(kind.resource, call.name)
        self._match_name(call, metadata["name"])
        if kind.namespaced:
            self._match_namespace(call, config)
            metadata.setdefault("namespace", call.namespace)
        where = f"{call.namespace}/{call.name}; {kind.group}/{kind.version}, Kind={kind.kind}"
        if kind.custom is not None or not kind.group:
            where = f"/{call.name}; {kind.group}/{kind.version}, Kind={kind.kind}"
        check_applied(config, kind.type, where)
        who = Manager(call.manager, "Apply", kind.api_version, call.subresource)
        if live is None:
            if metadata.get("uid"):
                wrong = errors.invalid("metadata.uid", metadata["uid"], "field is immutable")
                raise errors.unprocessable(kind.group, kind.kind, call.name, [wrong])
            base: Obj = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {}}
            made = apply(base, config, kind.type, {}, who, now(), force=force, reset=self._resets(call))
            fresh = {key: value for key, value in made.obj["metadata"].items() if key != "resourceVersion"}
            return self.create(call, {**made.obj, "metadata": fresh}, applied=made.managers), True
        return self._apply_to(call, live, config, who, force=force), False

    def _apply_to(self, call: Call, live: Obj, config: Obj, who: Manager, *, force: bool) -> Obj:
        version = config["metadata"].pop("resourceVersion", None)
        if version and version != live["metadata"]["resourceVersion"]:
            raise errors.conflict(call.kind.resource, call.name)
        managers = managers_of(live)
        if not managers:
            managers = self._before_first(call, live)
        made = apply(
            live, config, call.kind.type, managers, who, now(), force=force, reset=self._resets(call)
        )
        typed = self._validity.typed(call, made.obj, patched=True)
        return self._replace(call, live, typed, put=False, applied=made.managers)

    def _before_first(self, call: Call, live: Obj) -> Managers:
        who = Manager("before-first-apply", "Update", call.kind.api_version, "")
        empty = {"metadata": {}, **call.kind.strategy.empty}
        return {
            key: entry
            for key, entry in after_update(empty, live, call.kind.type, {}, who, now(), ()).items()
            if entry.paths
        }

    # ---- managed fields

    def _resets(self, call: Call) -> tuple[tuple[str, ...], ...]:
        if call.subresource == "status":
            found: tuple[tuple[str, ...], ...] = (("f:spec",),)
            if call.kind.custom is not None:
                found += (("f:metadata",),)
            return found
        if call.kind.status:
            return (("f:status",), *call.kind.strategy.resets)
        return call.kind.strategy.resets

    def _managed_create(self, call: Call, obj: Obj) -> Managers:
        who = Manager(call.manager, "Update", call.kind.api_version, call.subresource)
        empty = {"metadata": {}, **call.kind.strategy.empty}
        return after_update(empty, obj, call.kind.type, {}, who, now(), self._resets(call))

    def _managed_update(self, call: Call, live: Obj, new: Obj) -> Managers:
        managers = managers_of(live)
        if "managedFields" in new["metadata"] and new["metadata"]["managedFields"] in ([], [{}]):
            return {}
        if not managers:
            return {}
        who = Manager(call.manager, "Update", call.kind.api_version, call.subresource)
        return after_update(live, new, call.kind.type, managers, who, now(), self._resets(call))


def _status_only(live: Obj, new: Obj) -> Obj:
    made = {key: value for key, value in live.items() if key != "status"}
    kept = {"managedFields": new["metadata"]["managedFields"]} if "managedFields" in new["metadata"] else {}
    made["metadata"] = {**live["metadata"], **kept}
    return {**made, "status": new["status"]} if "status" in new else made


def _same(live: Obj, new: Obj) -> bool:
    if {**live, "metadata": None} != {**new, "metadata": None}:
        return False
    before, after = dict(live["metadata"]), dict(new["metadata"])
    for one in (before, after):
        entries = one.pop("managedFields", None) or []
        # They are in the order of their times, which do not count.
        one["managedFields"] = sorted(({**entry, "time": ""} for entry in entries), key=repr)
    return before == after
