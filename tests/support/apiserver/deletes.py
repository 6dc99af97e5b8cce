"""Delete: finalizers, grace periods, propagation, preconditions.

Gives: Deletes. Source: k8s.io/apiserver/pkg/registry/generic/registry/store.go, rest/delete.go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.apiserver import errors
from tests.support.apiserver.call import Call, now
from tests.support.apiserver.errors import Obj
from tests.support.apiserver.kinds import Kind

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer


class Deletes:
    """Removes objects from the store as an API server does."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._store = server.store

    def delete(self, call: Call, options: Obj) -> tuple[Obj, bool]:
        """Delete an object, or begin to; it, and whether it is gone. Raises StatusError."""
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

        if before and metadata.get("deletionGracePeriodSeconds") == live["metadata"].get(
            "deletionGracePeriodSeconds"
        ):
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
        stored = self._store.put(kind.storage, key, self._server.for_storage(dying, kind))
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
        return self.remove(kind, key, self._server.for_storage(last, kind))

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
            why = (
                f"the UID in the precondition ({uid}) does not match the UID in record ({metadata['uid']})."
                " The object might have been deleted and then recreated"
            )
            raise errors.conflict(resource, call.name, why)
        version = wanted.get("resourceVersion")
        if version is not None and version != metadata["resourceVersion"]:
            why = (
                f"the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record"
                f" ({metadata['resourceVersion']}). The object might have been modified"
            )
            raise errors.conflict(resource, call.name, why)

    def remove(self, kind: Kind, key: tuple[str, str], last: Obj) -> Obj:
        """Take an object out of the store at once; as it was last."""
        gone = self._store.delete(kind.storage, key, last)
        kind.strategy.deleted(gone, self._server)
        return self._server.converted(gone, kind)
