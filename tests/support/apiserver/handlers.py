"""From a request to its answer: JSON as it is, or a table, as ``kubectl get`` asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.apiserver import bodies, errors
from tests.support.apiserver.errors import Obj, StatusError
from tests.support.apiserver.exec import Command, command_of
from tests.support.apiserver.kinds import Call, Kind
from tests.support.apiserver.options import (
    VERBS,
    Target,
    delete_options,
    list_options,
    target_of,
    write_options,
)
from tests.support.apiserver.reads import as_list, shown, value_at
from tests.support.apiserver.watches import WatchEvent
from tests.support.apiserver.wire import MAX_BODY, Request, Response, encode

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

JSON = "application/json"


def negotiated(request: Request) -> str:
    """``Table``, or nothing for JSON as it is: the first that the Accept header names. Raises StatusError 406."""
    accept = request.header("Accept").strip()
    for clause in accept.split(",") if accept else ["*/*"]:
        media, *rest = [part.strip() for part in clause.split(";")]
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        if media not in {JSON, "*/*"}:
            continue
        if (shape := parameters.get("as", "")) in {"", "Table"}:
            return shape
    message = f"only the following media types are accepted: {JSON}"
    raise StatusError(406, "NotAcceptable", message)


def age(stamp: str) -> str:
    """Since a moment, as kubectl writes it."""
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds())
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{letter}"
    return f"{max(0, seconds)}s"


def _ready(pod: Obj) -> str:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return f"{sum(bool(one.get('ready')) for one in statuses)}/{len(pod['spec']['containers'])}"


COLUMNS: dict[str, dict[str, Callable[[Obj], str]]] = {
    "pods": {
        "Ready": _ready,
        "Status": lambda pod: value_at(pod, "status.phase"),
        "Restarts": lambda pod: str(
            sum(one.get("restartCount", 0) for one in pod.get("status", {}).get("containerStatuses") or [])
        ),
    },
    "leases": {"Holder": lambda lease: value_at(lease, "spec.holderIdentity")},
}
"""What tables of some kinds show between names and ages."""


def as_table(body: Obj, kind: Kind, *, listed: bool, header: bool = True) -> Obj:
    """A list or an object as a table."""
    own = COLUMNS.get(kind.plural, {})
    columns = [
        {"name": name, "type": "string", "format": form, "description": name, "priority": 0}
        for name, form in (("Name", "name"), *((one, "") for one in own), ("Age", ""))
    ]
    copied = ("resourceVersion", *(("continue", "remainingItemCount") if listed else ()))
    head = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    rows = []
    for one in body["items"] if listed else [body]:
        metadata = one["metadata"]
        cells = [metadata["name"], *(of(one) for of in own.values()), age(metadata["creationTimestamp"])]
        rows.append({"cells": cells, "object": {**head, "metadata": metadata}})
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {key: body["metadata"][key] for key in copied if body["metadata"].get(key)},
        "columnDefinitions": columns if header else None,
        "rows": rows,
    }


class Streaming(NamedTuple):
    """An answer that comes in parts."""

    headers: dict[str, str]
    parts: AsyncIterator[bytes]


class Upgrade(NamedTuple):
    """An answer over another protocol: a command in a container."""

    command: Command


Answer = Response | Streaming | Upgrade


class Handlers:
    """Answers allowed requests."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    async def answer(self, request: Request) -> Answer:
        """The answer. Raises StatusError."""
        if request.too_large and request.method != "GET":
            message = f"Request entity too large: limit is {MAX_BODY}"
            raise errors.StatusError(413, "RequestEntityTooLarge", message)
        target = target_of(request)
        if not target.is_resource:
            return self._server.discovery.answer(request)
        kind = self._kind(target)
        if target.subresource:
            return await self._subresource(request, target, kind)
        if target.name:
            return await self._object(request, target, kind)
        return await self._collection(request, target, kind)

    def _kind(self, target: Target) -> Kind:
        kinds = self._server.kinds
        if target.group and target.group not in kinds.groups:
            raise errors.no_page()
        kind = kinds.get(target.group, target.version, target.plural)
        custom = target.group not in kinds.builtin_groups and target.group
        if kind is None:
            raise errors.no_page() if custom else errors.no_resource()
        known_sub = not target.subresource or target.subresource in kind.subresources
        scope = kind.namespaced is target.scoped or (kind.namespaced and not target.name)
        if target.rest or not known_sub or not scope:
            raise (
                errors.no_page()
                if custom and not (target.subresource or target.rest)
                else (errors.not_found(kind.resource, target.name) if custom else errors.no_resource())
            )
        if target.namespace == "" and target.scoped:
            raise errors.no_resource()
        if (target.group, target.plural) in self._server.definitions.fresh:
            self._server.definitions.fresh.discard((target.group, target.plural))
            message = "storage is (re)initializing"
            raise errors.StatusError(
                429, "TooManyRequests", message, {"retryAfterSeconds": 1}, headers={"Retry-After": "1"}
            )
        return kind

    # ---- collections

    async def _collection(self, request: Request, target: Target, kind: Kind) -> Answer:
        if request.method == "GET" and "list" in kind.verbs:
            return await self._list(request, target, kind)
        if request.method == "POST" and "create" in kind.verbs and (target.scoped or not kind.namespaced):
            return self._create(request, target, kind)
        if request.method == "DELETE" and "deletecollection" in kind.verbs:
            return await self._delete_collection(request, target, kind)
        if kind.custom is not None and kind.namespaced and not target.scoped:
            raise errors.no_page()
        raise errors.not_allowed()

    async def _list(self, request: Request, target: Target, kind: Kind) -> Answer:
        shape = negotiated(request)
        options = list_options(request.query, watch=target.watch)
        namespace = target.namespace if kind.namespaced else ""
        if target.watch:
            self._server.watches.check(kind, options)
            return Streaming({"Content-Type": JSON}, self._events(kind, namespace, options, shape))
        body = as_list(await self._server.reads.page(kind, namespace, options), kind)
        return Response(200, as_table(body, kind, listed=True) if shape else body)

    async def _events(self, kind: Kind, namespace: str, options: Any, shape: str) -> AsyncIterator[bytes]:
        first = True
        async for event in self._server.watches.events(kind, namespace, options):
            obj = _event_object(event, kind, shape, first=first)
            yield encode({"type": event.type, "object": obj})
            first = False

    def _create(self, request: Request, target: Target, kind: Kind) -> Response:
        call = self._call(request, target, kind, dry_run=write_options("CreateOptions", request.query))
        body = bodies.decoded(request, kind)
        return self._written(request, call, lambda: (self._server.writes.create(call, body), True))

    async def _delete_collection(self, request: Request, target: Target, kind: Kind) -> Response:
        negotiated(request)
        options = delete_options(request.query, bodies.delete_body(request))
        page = await self._server.reads.page(kind, target.namespace, list_options(request.query, watch=False))
        for item in page.items:
            metadata = item["metadata"]
            dry = bool(options.get("dryRun"))
            call = Call(kind, metadata.get("namespace", ""), metadata["name"], dry_run=dry)
            self._server.writes.delete(call, dict(options))
        return Response(200, as_list(page, kind))

    # ---- objects

    async def _object(self, request: Request, target: Target, kind: Kind) -> Answer:
        method = request.method
        if method == "GET" and "get" in kind.verbs:
            return await self._get(request, target, kind)
        if method == "PUT" and "update" in kind.verbs:
            return self._update(request, target, kind)
        if method == "PATCH" and "patch" in kind.verbs:
            return self._patch(request, target, kind)
        if method == "DELETE" and "delete" in kind.verbs:
            return self._delete(request, target, kind)
        raise errors.not_allowed()

    async def _get(self, request: Request, target: Target, kind: Kind) -> Response:
        shape = negotiated(request)
        version = request.query.get("resourceVersion", "")
        obj = shown(await self._server.reads.get(kind, target.namespace, target.name, version), kind)
        return Response(200, as_table(obj, kind, listed=False) if shape else obj)

    def _update(self, request: Request, target: Target, kind: Kind) -> Response:
        call = self._call(request, target, kind, dry_run=write_options("UpdateOptions", request.query))
        body = bodies.decoded(request, kind)
        return self._written(request, call, lambda: self._server.writes.update(call, body))

    def _patch(self, request: Request, target: Target, kind: Kind) -> Response:
        call = self._call(request, target, kind, dry_run=write_options("PatchOptions", request.query))
        if (config := bodies.applied(request)) is not None:
            manager = request.query.get("fieldManager", "")
            return self._written(request, call, lambda: self._server.writes.apply(call, config, manager))
        change = bodies.change(request, kind)
        return self._written(request, call, lambda: (self._server.writes.patch(call, change), False))

    def _delete(self, request: Request, target: Target, kind: Kind) -> Response:
        options = delete_options(request.query, bodies.delete_body(request))
        call = self._call(request, target, kind, dry_run=bool(options.get("dryRun")))
        obj, removed = self._server.writes.delete(call, options)
        if not removed or kind.strategy.answers_object:
            return Response(200, shown(obj, kind))
        details = {**kind.resource.details(target.name), "uid": obj["metadata"]["uid"]}
        head: Obj = {"kind": "Status", "apiVersion": "v1", "metadata": {}}
        return Response(200, {**head, "status": "Success", "details": details})

    async def _subresource(self, request: Request, target: Target, kind: Kind) -> Answer:
        name, verbs = target.subresource, kind.subresources[target.subresource]["verbs"]
        if VERBS.get(request.method, "") not in verbs:
            raise errors.not_allowed()
        if name == "exec" and self._server.executor is not None:
            await self._server.reads.get(kind, target.namespace, target.name, "")
            return Upgrade(command_of(request, target.namespace, target.name))
        if name == "log" and self._server.logs is not None:
            await self._server.reads.get(kind, target.namespace, target.name, "")
            text = self._server.logs(command_of(request, target.namespace, target.name))
            return Response(200, raw=text, headers={"Content-Type": "text/plain"})
        if name not in {"status", "finalize"}:
            raise errors.StatusError(501, "NotImplemented", f"there is no {kind.plural}/{name} here")
        if request.method == "GET":
            return await self._get(request, target, kind)
        change = self._update if request.method == "PUT" else self._patch
        return change(request, target, kind)

    # ---- shared

    def _call(self, request: Request, target: Target, kind: Kind, *, dry_run: bool) -> Call:
        negotiated(request)
        return Call(
            kind,
            target.namespace if kind.namespaced else "",
            target.name,
            target.subresource,
            dry_run,
            request.query.get("fieldValidation") or "Warn",
        )

    def _written(self, request: Request, call: Call, write: Callable[[], tuple[Obj, bool]]) -> Response:
        """The answer to a write, with its warnings, also when it is refused."""
        try:
            obj, made = write()
        except errors.StatusError as error:
            error.headers |= _warnings(call)
            raise
        body = shown(obj, call.kind)
        shape = negotiated(request)
        return Response(
            201 if made else 200,
            as_table(body, call.kind, listed=False) if shape else body,
            headers=_warnings(call),
        )


def _warnings(call: Call) -> dict[str, str]:
    quoted = [one.replace("\\", "\\\\").replace('"', '\\"') for one in call.warnings]
    return {"Warning": "\r\nWarning: ".join(f'299 - "{one}"' for one in quoted)} if quoted else {}


def _event_object(event: WatchEvent, kind: Kind, shape: str, *, first: bool) -> Obj:
    if event.raw:
        return event.obj
    obj = shown(event.obj, kind)
    return as_table(obj, kind, listed=False, header=first) if shape else obj
