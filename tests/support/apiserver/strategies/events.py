"""Events, in their two versions.

Gives: CoreEvents, Events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import FieldError, Obj, invalid, required
from tests.support.apiserver.kinds import Strategy
from tests.support.apiserver.names import qualified_name_problem

RENAMED = {
    "involvedObject": "regarding",
    "message": "note",
    "count": "deprecatedCount",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "source": "deprecatedSource",
    "reportingComponent": "reportingController",
}
BACK = {new: old for old, new in RENAMED.items()}


class CoreEvents(Strategy):
    """core/v1, and how they are stored."""

    empty: ClassVar[Obj] = {
        "involvedObject": {},
        "source": {},
        "firstTimestamp": None,
        "lastTimestamp": None,
        "eventTime": None,
        "reportingComponent": "",
        "reportingInstance": "",
    }
    create_on_update = True
    cached = False
    fields: ClassVar[Mapping[str, str]] = {
        **{
            f"involvedObject.{one}": f"involvedObject.{one}"
            for one in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
        },
        "reason": "reason",
        "reportingComponent": "reportingComponent",
        "source": "source.component",
        "type": "type",
        "metadata.namespace": "metadata.namespace",
        "metadata.name": "metadata.name",
    }

    def __init__(self) -> None:
        self.from_storage = _as_core
        self.to_storage = None

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        namespace = (obj.get("involvedObject") or {}).get("namespace", "")
        own = obj["metadata"].get("namespace", "")
        found = []
        if namespace != own and not (namespace == "" and own in {"", "default"}):
            found.append(invalid("involvedObject.namespace", namespace, "does not match event.namespace"))
        return found


class Events(Strategy):
    """events.k8s.io/v1, stored as core/v1."""

    empty: ClassVar[Obj] = {
        "eventTime": None,
        "regarding": {},
        "deprecatedSource": {},
        "deprecatedFirstTimestamp": None,
        "deprecatedLastTimestamp": None,
    }
    create_on_update = True
    cached = False
    error_group = ""
    fields: ClassVar[Mapping[str, str]] = {
        **{
            f"regarding.{one}": f"regarding.{one}"
            for one in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
        },
        "reason": "reason",
        "reportingController": "reportingController",
        "type": "type",
        "metadata.namespace": "metadata.namespace",
        "metadata.name": "metadata.name",
    }

    def __init__(self) -> None:
        self.from_storage = _as_new
        self.to_storage = _stored

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        found: list[FieldError] = []
        namespace = (obj.get("regarding") or {}).get("namespace", "")
        own = obj["metadata"].get("namespace", "")
        if namespace != own and not (namespace == "" and own in {"", "default"}):
            found.append(invalid("involvedObject.namespace", namespace, "does not match event.namespace"))
            return found
        if not obj.get("eventTime"):
            found.append(required("eventTime"))
        found += _series_errors(obj)
        found += _word_errors(obj)
        if len(obj.get("note") or "") > 1024:
            found.append(invalid("message", "", "can have at most 1024 characters"))
        for name in ("firstTimestamp", "lastTimestamp", "count"):
            if obj.get(RENAMED[name]):
                found.append(invalid(name, "", "needs to be unset"))
        return found

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found = _series_errors(obj)
        for name in (
            "regarding",
            "reason",
            "reportingController",
            "reportingInstance",
            "action",
            "related",
            "note",
            "type",
            "eventTime",
        ):
            if obj.get(name) != old.get(name):
                found.append(invalid(BACK.get(name, name), obj.get(name), "field is immutable"))
        return found


def _series_errors(obj: Obj) -> list[FieldError]:
    series, found = obj.get("series"), []
    if series is not None:
        if series.get("count", 0) < 2:
            found.append(invalid("series.count", "", "should be at least 2"))
        if not series.get("lastObservedTime"):
            found.append(required("series.lastObservedTime"))
    return found


def _word_errors(obj: Obj) -> list[FieldError]:
    found = []
    controller = obj.get("reportingController", "")
    if not controller:
        found.append(required("reportingController"))
    if problem := qualified_name_problem(controller):
        found.append(invalid("reportingController", controller, problem))
        if not controller:
            more = qualified_name_problem("-")
            found.append(invalid("reportingController", controller, more))
    found += [required(name) for name in ("reportingInstance", "action", "reason") if not obj.get(name)]
    if obj.get("type") not in {"Normal", "Warning"}:
        kind = obj.get("type", "")
        found.append(invalid("type", "", f"has invalid value: {kind}"))
    return found


def _as_core(obj: Obj, kind: Any) -> Obj:
    del kind
    return obj


def _as_new(obj: Obj, kind: Any) -> Obj:
    del kind
    made = {RENAMED.get(name, name): value for name, value in obj.items()}
    for name in ("reportingController", "reportingInstance"):
        if made.get(name) == "":
            made.pop(name)
    return made


def _stored(obj: Obj, kind: Any) -> Obj:
    del kind
    if "involvedObject" in obj:
        return obj
    made = {BACK.get(name, name): value for name, value in obj.items()}
    return {**CoreEvents.empty, **made, "kind": "Event", "apiVersion": "v1"}
