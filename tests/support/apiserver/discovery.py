"""Paths that name no resource: what is served, versions, health, OpenAPI without schemas of objects.

Source: Kubernetes' OpenAPI documents, of which kubectl reads whether a server validates fields itself. A client
that finds no schemas leaves checking to the server.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from tests.support.apiserver import errors
from tests.support.apiserver.errors import Obj
from tests.support.apiserver.wire import Request, Response

if TYPE_CHECKING:
    from tests.support.apiserver.kinds import Kind
    from tests.support.apiserver.server import ApiServer

PROTOBUF: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
ASKED: Final = ("application/com.github.proto-openapi.spec.v2@v1.0+protobuf", PROTOBUF)
"""The first is not a media type to Go: it is asked for, never answered."""
TITLE, RELEASE = "Kubernetes", "1.36"


def version_2_protobuf() -> bytes:
    """The same for clients that ask for protobuf alone (kubectl): without paths and definitions."""
    info = _field(1, TITLE.encode()) + _field(2, RELEASE.encode())
    return _field(1, b"2.0") + _field(2, info) + _field(8, b"")


def version_3(kinds: Iterable[Kind]) -> Obj:
    """/openapi/v3/apis/GROUP/VERSION: that patches take fieldValidation, which is all kubectl asks of it."""
    return {
        "openapi": "3.0.0",
        "info": {"title": TITLE, "version": RELEASE},
        "paths": {f"/{one.plural}/{{name}}": {"patch": _patch(one)} for one in kinds},
        "components": {"schemas": {}},
    }


def _field(number: int, value: bytes) -> bytes:
    """A field of a message that is a message or text, shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


def _patch(kind: Kind) -> Obj:
    gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    asked = {"name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    answers = {"200": {"description": "OK"}}
    return {"parameters": [asked], "responses": answers, "x-kubernetes-group-version-kind": gvk}


ADDRESS = "192.0.2.10:6443"
VERSION: Obj = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "go1.26.0",
    "compiler": "gc",
    "platform": "linux/amd64",
}
TEXT = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}


class Discovery:
    """Answers such paths. Discovery is served in parts: clients that ask for all of it at once take these, too."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def answer(self, request: Request) -> Response:
        """The answer. Raises StatusError."""
        path = request.path.rstrip("/")
        first = path.split("/")[1] if path else ""
        if path in {"/healthz", "/livez", "/readyz"}:
            return Response(200, raw=b"ok", headers=TEXT)
        if path == "/version":
            return Response(200, VERSION)
        if first == "openapi":
            return self._openapi(request, path)
        if first not in {"api", "apis"}:
            raise errors.no_page()
        if request.method not in {"GET", "HEAD"}:
            raise errors.not_allowed()
        return Response(200, self._served(path.split("/")[1:]))

    def _served(self, parts: list[str]) -> Obj:
        kinds = self._server.kinds
        match parts:
            case ["api"]:
                where = [{"clientCIDR": "0.0.0.0/0", "serverAddress": ADDRESS}]
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": where}
            case ["apis"]:
                groups = [self._group(name) for name in kinds.groups]
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
            case ["api", "v1"]:
                return self._resources("", "v1")
            case ["apis", group] if group in kinds.groups:
                return {"kind": "APIGroup", "apiVersion": "v1", **self._group(group)}
            case ["apis", group, version] if version in kinds.groups.get(group, ()):
                return self._resources(group, version)
            case ["api", *_]:
                raise errors.no_resource()
            case [_, group, *_] if group in kinds.builtin_groups:
                raise errors.no_resource()
        raise errors.no_page()

    def _group(self, name: str) -> Obj:
        versions = [
            {"groupVersion": f"{name}/{one}", "version": one} for one in self._server.kinds.groups[name]
        ]
        return {"name": name, "versions": versions, "preferredVersion": versions[0]}

    def _resources(self, group: str, version: str) -> Obj:
        found: list[Obj] = []
        for kind in self._server.kinds.of(group, version):
            optional: Obj = {"shortNames": list(kind.short), "categories": list(kind.categories)}
            if "watch" in kind.verbs:
                optional["storageVersionHash"] = kind.hash or _hash(f"{group}/{version}/{kind.kind}")
            found.append(
                {
                    "name": kind.plural,
                    "singularName": kind.singular,
                    "namespaced": kind.namespaced,
                    "kind": kind.kind,
                    "verbs": list(kind.verbs),
                    **{key: value for key, value in optional.items() if value},
                }
            )
            found += kind.subresources.values()
        head: Obj = {"kind": "APIResourceList", **({"apiVersion": "v1"} if group else {})}
        return {**head, "groupVersion": f"{group}/{version}" if group else version, "resources": found}

    def _openapi(self, request: Request, path: str) -> Response:
        kinds = self._server.kinds
        served = {"api/v1": ("", "v1")}
        served |= {f"apis/{name}/{one}": (name, one) for name, of in kinds.groups.items() for one in of}
        if path == "/openapi/v3":
            index = {
                one: {"serverRelativeURL": f"/openapi/v3/{one}?hash={_hash(one)}"} for one in sorted(served)
            }
            return Response(200, {"paths": index})
        if path == "/openapi/v2" and any(one in request.header("Accept") for one in ASKED):
            return Response(200, raw=version_2_protobuf(), headers={"Content-Type": PROTOBUF})
        if (of := served.get(path.removeprefix("/openapi/v3/"))) is None:
            raise errors.no_page()
        return Response(200, version_3(kinds.of(*of)))


def _hash(value: str) -> str:
    return base64.b64encode(hashlib.sha256(value.encode()).digest()[:8]).decode()
