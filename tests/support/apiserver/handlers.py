"""From a request to its answer.

Gives: Handlers, Streaming, Answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.apiserver import bodies, errors, reviews
from tests.support.apiserver.auth import User
from tests.support.apiserver.call import Call
from tests.support.apiserver.errors import Obj, Resource
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.negotiate import (
    JSON,
    Form,
    metadata_list,
    metadata_only,
    negotiate,
    rendered,
)
from tests.support.apiserver.options import delete_options, list_options, truth, write_options
from tests.support.apiserver.paths import Target, target_of
from tests.support.apiserver.plain import Plain
from tests.support.apiserver.reads import as_list, shown
from tests.support.apiserver.tables import as_table
from tests.support.apiserver.watches import WatchEvent
from tests.support.apiserver.wire import Request, Response, encode

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer


class Streaming(NamedTuple):
    """An answer that comes in parts."""

    headers: dict[str, str]
    parts: AsyncIterator[bytes]


Answer = Response | Streaming


class Handlers:
    """Answers allowed requests."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._plain = Plain(server)

    async def answer(self, request: Request, user: User) -> Answer:
        """The answer. Raises StatusError."""
        target = target_of(request)
        if not target.is_resource:
            return self._plain.answer(request, user)
        kind = self._kind(target)
        if target.subresource:
            return await self._subresource(request, user, target, kind)
        if target.name:
            return await self._object(request, user, target, kind)
        return await self._collection(request, user, target, kind)

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

    async def _collection(self, request: Request, user: User, target: Target, kind: Kind) -> Answer:
        if request.method == "GET" and "list" in kind.verbs:
            return await self._list(request, target, kind)
        if request.method == "POST" and "create" in kind.verbs and (target.scoped or not kind.namespaced):
            return self._create(request, user, target, kind)
        if request.method == "DELETE" and "deletecollection" in kind.verbs:
            return await self._delete_collection(request, user, target, kind)
        if kind.custom is not None and kind.namespaced and not target.scoped:
            raise errors.no_page()
        raise errors.not_allowed()

    async def _list(self, request: Request, target: Target, kind: Kind) -> Answer:
        watch = target.watch
        form = negotiate(request, custom=kind.custom is not None, watch=watch)
        options = list_options(request.query, watch=watch)
        namespace = target.namespace if kind.namespaced else ""
        if watch:
            return self._watch(request, kind, namespace, options, form)
        page = await self._server.reads.page(kind, namespace, options)
        body = as_list(page, kind)
        include = request.query.get("includeObject", "")
        return self._formed(body, kind, form, include, listed=True)

    def _watch(self, request: Request, kind: Kind, namespace: str, options: Any, form: Form) -> Streaming:
        self._server.watches.check(kind, options)
        include = request.query.get("includeObject", "")

        async def parts() -> AsyncIterator[bytes]:
            first = True
            async for event in self._server.watches.events(kind, namespace, options):
                if form.shape == "PartialObjectMetadataList":
                    return
                yield encode(
                    {"type": event.type, "object": _event_object(event, kind, form, include, first=first)}
                )
                first = False

        return Streaming({"Content-Type": JSON}, parts())

    def _create(self, request: Request, user: User, target: Target, kind: Kind) -> Response:
        form = negotiate(request, custom=kind.custom is not None)
        dry = write_options("CreateOptions", request.query)
        body = bodies.decoded(request, kind, self._server.kinds)
        call = self._call(request, user, target, kind, dry_run=dry)
        call.warnings += kind.strategy.warnings(body)
        try:
            if (kind.group, kind.plural) in reviews.REVIEWS:
                return Response(201, reviews.review(self._server, user, call, body))
            made = self._server.writes.create(call, body)
        except errors.StatusError as error:
            raise _warned(error, call) from error
        return self._formed(shown(made, kind), kind, form, "", code=201, call=call)

    async def _delete_collection(self, request: Request, user: User, target: Target, kind: Kind) -> Response:
        form = negotiate(request, custom=kind.custom is not None)
        options = delete_options(request.query, bodies.delete_body(request))
        listing = list_options(request.query, watch=False)
        page = await self._server.reads.page(kind, target.namespace, listing)
        for item in page.items:
            metadata = item["metadata"]
            call = Call(
                kind,
                metadata.get("namespace", ""),
                metadata["name"],
                dry_run=bool(options.get("dryRun")),
                user=user,
            )
            self._server.writes.delete(call, dict(options))
        return self._formed(as_list(page, kind), kind, form, "", listed=True)

    # ---- objects

    async def _object(self, request: Request, user: User, target: Target, kind: Kind) -> Answer:
        if target.legacy_watch:
            options = list_options(
                {**request.query, "fieldSelector": f"metadata.name={target.name}"}, watch=True
            )
            form = negotiate(request, custom=kind.custom is not None, watch=True)
            return self._watch(request, kind, target.namespace, options, form)
        method = request.method
        if method == "GET" and "get" in kind.verbs:
            return await self._get(request, target, kind)
        if method == "PUT" and "update" in kind.verbs:
            return self._update(request, user, target, kind)
        if method == "PATCH" and "patch" in kind.verbs:
            return self._patch(request, user, target, kind)
        if method == "DELETE" and "delete" in kind.verbs:
            return self._delete(request, user, target, kind)
        raise errors.not_allowed()

    async def _get(self, request: Request, target: Target, kind: Kind) -> Response:
        form = negotiate(request, custom=kind.custom is not None)
        version = request.query.get("resourceVersion", "")
        obj = await self._server.reads.get(kind, target.namespace, target.name, version)
        return self._formed(shown(obj, kind), kind, form, request.query.get("includeObject", ""))

    def _update(self, request: Request, user: User, target: Target, kind: Kind) -> Response:
        form = negotiate(request, custom=kind.custom is not None)
        dry = write_options("UpdateOptions", request.query)
        body = bodies.decoded(request, kind, self._server.kinds)
        call = self._call(request, user, target, kind, dry_run=dry)
        try:
            obj, made = self._server.writes.update(call, body)
        except errors.StatusError as error:
            raise _warned(error, call) from error
        return self._formed(shown(obj, kind), kind, form, "", code=201 if made else 200, call=call)

    def _patch(self, request: Request, user: User, target: Target, kind: Kind) -> Response:
        form = negotiate(request, custom=kind.custom is not None)
        media = bodies.patch_media(request, kind)
        applies = media.startswith("application/apply-patch")
        dry = write_options("PatchOptions", request.query, applies=applies)
        call = self._call(request, user, target, kind, dry_run=dry)
        made = False
        try:
            if applies:
                config = bodies.apply_body(request, kind)
                force = truth(request.query.get("force"))
                obj, made = self._server.writes.apply(call, config, force=force)
            else:
                obj = self._server.writes.patch(call, bodies.change(request, kind, media))
        except errors.StatusError as error:
            raise _warned(error, call) from error
        return self._formed(shown(obj, kind), kind, form, "", code=201 if made else 200, call=call)

    def _delete(self, request: Request, user: User, target: Target, kind: Kind) -> Response:
        form = negotiate(request, custom=kind.custom is not None)
        options = delete_options(request.query, bodies.delete_body(request))
        call = self._call(request, user, target, kind, dry_run=bool(options.get("dryRun")))
        obj, gone = self._server.writes.delete(call, options)
        if gone and not kind.strategy.answers_object:
            details: Obj = {"name": target.name}
            if kind.group:
                details["group"] = kind.group
            details |= {"kind": kind.plural, "uid": obj["metadata"]["uid"]}
            body: Obj = {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Success",
                "details": details,
            }
            return self._written(200, body, form, call)
        return self._formed(shown(obj, kind), kind, form, "", call=call)

    async def _subresource(self, request: Request, user: User, target: Target, kind: Kind) -> Answer:
        name, verbs = target.subresource, kind.subresources[target.subresource]["verbs"]
        verb = {"GET": "get", "PUT": "update", "PATCH": "patch", "POST": "create", "DELETE": "delete"}.get(
            request.method, ""
        )
        if verb not in verbs:
            raise errors.not_allowed()
        if name in {"status", "finalize"}:
            if verb == "get":
                return await self._get(request, target, kind)
            if verb == "update":
                return self._update(request, user, target, kind)
            return self._patch(request, user, target, kind)
        if kind.plural == "pods" and name in {"binding", "eviction"}:
            call = self._call(request, user, target, kind, dry_run=False)
            return reviews.pod_subresource(self._server, call, bodies.loaded(request), name)
        if kind.plural == "serviceaccounts" and name == "token":
            form = negotiate(request, custom=False)
            call = self._call(request, user, target, kind, dry_run=False)
            body = self._server.account_tokens.request(call, bodies.loaded(request))
            return self._written(201, body, form, call)
        raise errors.StatusError(501, "NotImplemented", f"the stand-in has no {kind.plural}/{name}")

    # ---- shared

    def _call(self, request: Request, user: User, target: Target, kind: Kind, *, dry_run: bool) -> Call:
        manager = request.query.get("fieldManager") or request.header("User-Agent").split("/")[0] or "unknown"
        return Call(
            kind,
            target.namespace if kind.namespaced else "",
            target.name,
            target.subresource,
            manager,
            dry_run,
            user,
            request.query.get("fieldValidation") or "Warn",
        )

    def _formed(
        self,
        body: Obj,
        kind: Kind,
        form: Form,
        include: str,
        *,
        listed: bool = False,
        code: int = 200,
        call: Call | None = None,
    ) -> Response:
        if form.shape == "Table":
            body = as_table(body, kind, include, listed=listed, version=form.version)
        elif form.shape == "PartialObjectMetadataList" and listed:
            body = metadata_list(body)
        elif form.shape and not listed:
            body = metadata_only(body)
        return self._written(code, body, form, call, kind)

    def _written(
        self, code: int, body: Obj, form: Form, call: Call | None, kind: Kind | None = None
    ) -> Response:
        headers = {"Content-Type": form.media}
        warnings = list(call.warnings) if call is not None else []
        if kind is not None:
            warnings = self._deprecations(kind) + warnings
        if warnings:
            headers["Warning"] = "\r\nWarning: ".join(_warning(one) for one in warnings)
        return Response(code, headers=headers, raw=rendered(body, form.media))

    def _deprecations(self, kind: Kind) -> list[str]:
        if kind.custom is not None and kind.custom.get("deprecated"):
            told = f"{kind.api_version} {kind.kind} is deprecated"
            newer = [
                one
                for one in self._server.kinds.all()
                if (one.group, one.plural) == (kind.group, kind.plural) and not one.custom.get("deprecated")
            ]
            if newer:
                told += f"; use {newer[0].api_version} {kind.kind}"
            return [kind.custom.get("deprecationWarning") or told]
        if (kind.group, kind.plural) == ("", "endpoints"):
            return ["v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"]
        return []


def _warning(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 - "{quoted}"'


def _warned(error: errors.StatusError, call: Call) -> errors.StatusError:
    if call.warnings:
        error.headers["Warning"] = "\r\nWarning: ".join(_warning(one) for one in call.warnings)
    return error


def _event_object(event: WatchEvent, kind: Kind, form: Form, include: str, *, first: bool) -> Obj:
    if event.raw:
        return event.obj
    obj = shown(event.obj, kind)
    if form.shape == "Table":
        return as_table(obj, kind, include, listed=False, header=first, version=form.version)
    if form.shape == "PartialObjectMetadata":
        return metadata_only(obj)
    return obj


Resources = Resource
