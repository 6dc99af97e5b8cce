"""Paths that name no resource: discovery, versions, health.

Gives: Plain.
"""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import TYPE_CHECKING

from tests.support.apiserver import errors, openapi
from tests.support.apiserver.auth import User
from tests.support.apiserver.discovery import AGGREGATED, HEALTH, VERSION, etag
from tests.support.apiserver.errors import Obj
from tests.support.apiserver.negotiate import negotiate
from tests.support.apiserver.wire import Request, Response

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

TEXT = {"Content-Type": "text/plain; charset=utf-8"}
STARTED = formatdate(usegmt=True)


class Plain:
    """Answers such paths."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self.broken: set[str] = set()

    def answer(self, request: Request, user: User) -> Response:
        """The answer. Raises StatusError."""
        path = request.path.rstrip("/") or "/"
        first = path.split("/")[1]
        if first in {"healthz", "livez", "readyz"}:
            return self._health(request, path)
        if path == "/version":
            return Response(200, raw=json.dumps(VERSION, indent=2).encode())
        if first == "openapi":
            return self._openapi(request, path)
        if first in {"api", "apis"}:
            return self._discovery(request, path)
        if path == "/":
            return Response(200, raw=json.dumps(self._server.discovery.paths(), indent=2).encode())
        raise errors.no_page()

    def _health(self, request: Request, path: str) -> Response:
        _, check, *rest = path.split("/")
        names = [one for one in HEALTH if not (check == "readyz" and one == "etcd")]
        if rest and rest[0] not in names:
            raise errors.no_page()
        broken = [one for one in names if one in self.broken]
        headers = {**TEXT, "X-Content-Type-Options": "nosniff"}
        if not broken and "verbose" not in request.query:
            return Response(200, raw=b"ok", headers=headers)
        lines = [f"[-]{one} failed: reason withheld" if one in broken else f"[+]{one} ok" for one in names]
        lines.append(f"{check} check failed" if broken else f"{check} check passed")
        return Response(500 if broken else 200, raw=("\n".join(lines) + "\n").encode(), headers=headers)

    def _discovery(self, request: Request, path: str) -> Response:
        parts = path.split("/")[1:]
        documents = self._server.discovery
        if len(parts) == 1:
            form = negotiate(request, custom=True, shapes=False, aggregated=True)
            if form.shape:
                return self._aggregated(request, core=parts[0] == "api")
            return Response(200, documents.versions() if parts[0] == "api" else documents.groups())
        negotiate(request, custom=True, shapes=False)
        if parts[0] == "api":
            if parts[1:] != ["v1"]:
                raise errors.no_resource()
            return self._get(request, documents.resources("", "v1"))
        group = parts[1]
        if group not in self._server.kinds.groups:
            raise errors.no_page()
        if len(parts) == 2:
            return self._get(request, documents.group(group))
        if parts[2] not in self._server.kinds.groups[group]:
            raise errors.no_resource() if group in self._server.kinds.builtin_groups else errors.no_page()
        return self._get(request, documents.resources(group, parts[2]))

    def _get(self, request: Request, body: Obj) -> Response:
        if request.method not in {"GET", "HEAD"}:
            raise errors.not_allowed()
        return Response(200, body)

    def _aggregated(self, request: Request, *, core: bool) -> Response:
        body = self._server.discovery.aggregated(core=core)
        tag = f'"{etag(body)}"'
        headers = {"ETag": tag, "Vary": "Accept", "Cache-Control": "public"}
        if request.header("If-None-Match") == tag:
            return Response(304, headers={**headers, "Content-Type": ""})
        return Response(200, body, headers={**headers, "Content-Type": AGGREGATED})

    def _openapi(self, request: Request, path: str) -> Response:
        if path == "/openapi/v3":
            body = json.dumps(self._server.discovery.openapi_index()).encode()
            return Response(200, raw=body, headers={**TEXT, "Accept-Ranges": "bytes"})
        if path == "/openapi/v2":
            return self._openapi_2(request)
        if path.startswith("/openapi/v3/"):
            return self._openapi_3(request, path.removeprefix("/openapi/v3/"))
        raise errors.no_page()

    def _openapi_2(self, request: Request) -> Response:
        if any(one in request.header("Accept") for one in openapi.ASKED):
            return Response(200, raw=openapi.version_2_protobuf(), headers={"Content-Type": openapi.PROTOBUF})
        kinds = self._server.kinds
        groups = [("", "v1"), *((name, one) for name, of in kinds.groups.items() for one in of)]
        document = openapi.version_2(kind for group in groups for kind in kinds.of(*group))
        return _document(request, document, {"Vary": "Accept-Encoding, Accept"}, etag(document))

    def _openapi_3(self, request: Request, name: str) -> Response:
        """One group's version, which a client may name by its hash for good."""
        kinds = self._server.kinds
        parts = name.split("/")
        group, version = (
            ("", parts[-1]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[-1])
        )
        served = kinds.groups.get(group, ()) if group else ["v1"]
        if len(parts) != (3 if group else 2) or version not in served:
            raise errors.no_page()
        tag, asked = etag(name), request.query.get("hash")
        if asked and asked != tag:
            place = f"/openapi/v3/{name}?hash={tag}"
            moved = {"Location": place, "Etag": f'"{tag}"', "Vary": "Accept"}
            return Response(301, raw=b"", headers={**moved, "Content-Type": "application/json"})
        headers = {"Vary": "Accept"}
        if asked:
            headers |= {"Cache-Control": "public, immutable", "Expires": "Fri, 01 Jan 2100 00:00:00 UTC"}
        return _document(request, openapi.version_3(kinds.of(group, version)), headers, tag)


def _document(request: Request, document: Obj, headers: dict[str, str], tag: str) -> Response:
    headers = {**headers, "Etag": f'"{tag}"'}
    if request.header("If-None-Match") == f'"{tag}"':
        return Response(304, headers={**headers, "Content-Type": ""})
    own = {"Accept-Ranges": "bytes", "Content-Type": "application/json", "Last-Modified": STARTED}
    return Response(200, raw=json.dumps(document).encode(), headers={**headers, **own})
