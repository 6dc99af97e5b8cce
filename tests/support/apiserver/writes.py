"""Create, update, patch, and delete: finalizers, grace periods, propagation, preconditions.

Source: k8s.io/apiserver/pkg/registry/generic/registry/store.go, endpoints/handlers, rest/delete.go.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.apiserver import errors
from tests.support.apiserver.bodies import apply_patch
from tests.support.apiserver.errors import Obj, StatusError
from tests.support.apiserver.kinds import Call, Kind, now
from tests.support.apiserver.valid import Validity, metadata_errors, metadata_update_errors

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer


class Deletes:
    """Removes objects from the store as an API server does."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._store = server.store

    def delete(self, call: Call, options: Obj) -> tuple[Obj, bool]:
        """Delete an object, or begin to; it, and whether it is removed. Raises StatusError."""
        kind = call.kind
        live = self._server.live(call)
        if live is None:
            raise errors.not_found(kind.resource, call.name)
        self._check_preconditions(call, live, options.get("preconditions") or {})
        self._server.admission.delete(call, live)
        key = (live["metadata"].get("namespace", ""), call.name)
        metadata = dict(live["metadata"])
        finalizers = self._with_policy(metadata, options)
        finalizers += [one for one in kind.strategy.delete_finalizers(live) if one not in finalizers]
        grace = kind.strategy.grace(live, options)
        before = metadata.get("deletionTimestamp")
        if not finalizers and not grace and not kind.strategy.pending(live):
            return self._delete_now(call, key, live, metadata), True
        if (
            before
            and metadata.get("deletionGracePeriodSeconds", 0) <= grace
            and finalizers == (live["metadata"].get("finalizers") or [])
        ):
            return live, False
        metadata |= {"deletionTimestamp": now(grace), "deletionGracePeriodSeconds": grace}
        if before and grace == live["metadata"].get("deletionGracePeriodSeconds"):
            metadata["deletionTimestamp"] = before
        if finalizers:
            metadata["finalizers"] = finalizers
        else:
            metadata.pop("finalizers", None)
        if not before and "generation" in metadata:
            metadata["generation"] += 1
        dying = {**live, "metadata": metadata}
        kind.strategy.dying(dying)
        if call.dry_run:
            return dying, False
        stored = self._store.put(kind.storage, key, dying)
        kind.strategy.stored(stored, self._server)
        return self._server.converted(stored, kind), False

    def _delete_now(self, call: Call, key: tuple[str, str], live: Obj, metadata: Obj) -> Obj:
        kind = call.kind
        metadata.pop("finalizers", None)
        last = live
        if kind.strategy.graceful:
            if "generation" in metadata and not metadata.get("deletionTimestamp"):
                metadata["generation"] += 1
            bound = kind.strategy.grace(live, {}) > 0
            metadata |= {
                "deletionTimestamp": metadata.get("deletionTimestamp") or now(),
                "deletionGracePeriodSeconds": 0,
            }
            last = {**live, "metadata": metadata}
            if call.dry_run:
                return last
            if bound or live["metadata"].get("deletionTimestamp"):
                last = self._store.put(kind.storage, key, last)
        if call.dry_run:
            return last
        return self._remove(kind, key, last)

    def _with_policy(self, metadata: Obj, options: Obj) -> list[str]:
        finalizers = [*(metadata.get("finalizers") or ())]
        policy = options.get("propagationPolicy")
        if options.get("orphanDependents") is not None:
            policy = "Orphan" if options["orphanDependents"] else "Background"
        if policy is None:
            return finalizers
        finalizers = [one for one in finalizers if one not in {"orphan", "foregroundDeletion"}]
        added = {"Orphan": ["orphan"], "Foreground": ["foregroundDeletion"]}.get(policy, [])
        return finalizers + added

    def _check_preconditions(self, call: Call, live: Obj, wanted: Obj) -> None:
        metadata = live["metadata"]
        resource = errors.Resource(call.kind.group, call.kind.kind)
        if (uid := wanted.get("uid")) is not None and uid != metadata["uid"]:
            why = f"the UID in the precondition ({uid}) does not match the UID in record ({metadata['uid']})"
            raise errors.conflict(resource, call.name, why)
        version = wanted.get("resourceVersion")
        if version is not None and version != metadata["resourceVersion"]:
            why = f"the ResourceVersion in the precondition ({version}) is not {metadata['resourceVersion']}"
            raise errors.conflict(resource, call.name, why)

    def _remove(self, kind: Kind, key: tuple[str, str], last: Obj) -> Obj:
        """Take an object out of the store at once; as it was last."""
        removed = self._store.delete(kind.storage, key, last)
        kind.strategy.deleted(removed, self._server)
        return self._server.converted(removed, kind)


ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
SYSTEM_FIELDS = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "managedFields",
)
"""What only the server writes. Who owns which field is not recorded here."""


class Writes(Deletes):
    """Changes the store as the handlers of an API server do."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__(server)
        self._validity = Validity(server)
        self._applied: dict[tuple[object, ...], Obj] = {}
        """The last configuration that a manager has applied to an object."""

    # ---- create

    def create(self, call: Call, body: Obj) -> Obj:
        """Store a new object. Raises StatusError."""
        kind, strategy = call.kind, call.kind.strategy
        if isinstance(body.get("metadata"), dict):
            self._match(call, body, named=False)
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
        strategy.admit_create(obj, self._server)
        self._server.admission.create(call, obj)
        obj["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind.custom is not None and kind.status:
            obj.pop("status", None)
        if kind.custom is not None or strategy.generations:
            obj["metadata"]["generation"] = 1
        self._validity.refuse_invalid(
            call, metadata_errors(obj, kind) + self._validity.content_errors(call, obj), obj
        )
        self._server.limits.check_size(obj)
        key = (metadata.get("namespace", ""), metadata["name"])
        existing = self._store.get(kind.storage, key)
        if existing is not None:
            dying = existing["metadata"].get("deletionTimestamp")
            prefix = "object is being deleted: " if dying else ""
            raise errors.already_exists(kind.resource, metadata["name"], prefix)
        if call.dry_run:
            return obj
        strategy.prepare_create(obj, self._server)
        stored = self._store.put(kind.storage, key, obj)
        strategy.stored(stored, self._server)
        return self._server.converted(stored, kind)

    def _generated(self, kind: Kind, namespace: str, prefix: str) -> str:
        name = ""
        for _ in range(8):
            name = prefix[:58] + "".join(random.choices(ALPHABET, k=5))  # noqa: S311
            if self._store.get(kind.storage, (namespace if kind.namespaced else "", name)) is None:
                break
        return name

    def _match(self, call: Call, body: Obj, *, named: bool = True) -> Obj:
        """The metadata of an object that is the one the path names. Raises StatusError."""
        metadata = body.get("metadata") or {}
        for wrong, what in (
            (named and metadata.get("name") != call.name, "name"),
            (
                call.kind.namespaced and metadata.get("namespace") not in {None, "", call.namespace},
                "namespace",
            ),
        ):
            if wrong:
                raise errors.bad_request(f"the {what} of the object does not match the {what} on the URL")
        return metadata if isinstance(metadata, dict) else {}

    # ---- update

    def update(self, call: Call, body: Obj) -> tuple[Obj, bool]:
        """Put an object in place; it, and whether it is new. Raises StatusError."""
        version = self._match(call, body).get("resourceVersion")
        live = self._server.live(call)
        if live is None:
            if not call.kind.strategy.create_on_update or call.subresource or version:
                raise errors.not_found(call.kind.resource, call.name)
            return self.create(call, body), True
        return self._replace(call, live, self._validity.typed(call, body), put=True), False

    def patch(self, call: Call, change: Callable[[Obj], Obj]) -> Obj:
        """Change an object. Raises StatusError."""
        live = self._server.live(call)
        if live is None:
            raise errors.not_found(call.kind.resource, call.name)
        body = change(live)
        self._match_type(call, body)
        self._match(call, body)
        try:
            typed = self._validity.typed(call, body)
        except StatusError as error:
            if error.code != 400 or "cannot unmarshal" not in str(error):
                raise
            raise self._bad_patch(body, str(error)) from error
        return self._replace(call, live, typed, put=False)

    def apply(self, call: Call, config: Obj, manager: str) -> tuple[Obj, bool]:
        """Lay an applied configuration over an object; it, and whether it is new. Raises StatusError.

        What others own is not known here: nothing conflicts.
        """
        place = (call.kind.storage, call.namespace, call.name, call.subresource, manager)
        new = self._server.live(call) is None and not call.subresource
        if new:
            metadata = {**(config.get("metadata") or {}), "name": call.name}
            obj = self.create(call, {**config, "metadata": metadata})
        else:
            last = self._applied.get(place)
            obj = self.patch(call, lambda live: apply_patch(live, config, last, call.kind.type))
        if not call.dry_run:
            self._applied[place] = config
        return obj, new

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
        return errors.unprocessable("", "", "", [wrong])

    def _replace(self, call: Call, live: Obj, new: Obj, *, put: bool) -> Obj:
        kind, strategy = call.kind, call.kind.strategy
        self._check_version(call, live, new, put=put)
        metadata = self._merged_metadata(call, live, new)
        new = self._only_part(call, live, {**new, "metadata": metadata})
        strategy.admit_update(new, live, self._server)
        self._validity.refuse_invalid(call, metadata_update_errors(new, live), new)
        strategy.prepare_update(new, live, self._server)
        self._count_generation(call, live, new)
        wrong = metadata_errors(new, kind) + self._validity.content_errors(call, new, live)
        self._validity.refuse_invalid(call, wrong, new)
        return self._store_change(call, live, new)

    def _store_change(self, call: Call, live: Obj, new: Obj) -> Obj:
        kind = call.kind
        version = live["metadata"]["resourceVersion"]
        new["metadata"]["resourceVersion"] = version
        if live == new:
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
        graceful = kind.strategy.graceful and not live["metadata"].get("finalizers")
        if ended and metadata.get("deletionGracePeriodSeconds", 0) == 0 and not graceful:
            self._remove(kind, key, live)
            return new
        put = self._store.put(kind.storage, key, new)
        kind.strategy.stored(put, self._server)
        return self._server.converted(put, kind)

    def _check_version(self, call: Call, live: Obj, new: Obj, *, put: bool) -> None:
        given = str((new.get("metadata") or {}).get("resourceVersion") or "")
        if given in {"", "0"}:
            if put and call.kind.custom is not None:
                wrong = errors.invalid("metadata.resourceVersion", 0, "must be specified for an update")
                raise errors.unprocessable(call.kind.group, call.kind.plural, call.name, [wrong])
        elif not given.isdigit():
            raise errors.internal(f'strconv.ParseUint: parsing "{given}": invalid syntax')
        elif given != live["metadata"]["resourceVersion"]:
            raise errors.conflict(call.kind.resource, call.name)
        uid = (new.get("metadata") or {}).get("uid")
        if put and uid and uid != live["metadata"]["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {live['metadata']['uid']}"
            raise errors.conflict(call.kind.resource, call.name, why)

    def _merged_metadata(self, call: Call, live: Obj, new: Obj) -> Obj:
        old = live["metadata"]
        made = {
            key: value
            for key, value in (new.get("metadata") or {}).items()
            if key == "uid" or key not in {*SYSTEM_FIELDS, "generation", "resourceVersion"}
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
        if kind.status:
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


def _status_only(live: Obj, new: Obj) -> Obj:
    made = {key: value for key, value in live.items() if key != "status"}
    return {**made, "status": new["status"]} if "status" in new else made
