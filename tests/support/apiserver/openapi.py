"""What clients learn from OpenAPI documents: which resources there are, and what a patch may ask for.

Gives: version_2(), version_2_protobuf(), version_3().
Source: Kubernetes' OpenAPI documents, of which kubectl reads whether a server validates fields itself. Schemas of
objects are left out: a client that finds none leaves checking to the server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from tests.support.apiserver.errors import Obj

if TYPE_CHECKING:
    from tests.support.apiserver.kinds import Kind

PROTOBUF: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
ASKED: Final = ("application/com.github.proto-openapi.spec.v2@v1.0+protobuf", PROTOBUF)
"""The first is no media type to Go any more: it is asked for, never answered."""
TITLE, VERSION = "Kubernetes", "1.36"
_PARAMETERS: Final = {
    "POST": ("dryRun", "fieldManager", "fieldValidation"),
    "PUT": ("dryRun", "fieldManager", "fieldValidation"),
    "PATCH": ("dryRun", "fieldManager", "fieldValidation", "force"),
    "DELETE": ("dryRun", "gracePeriodSeconds", "propagationPolicy"),
}
_VERBS: Final = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE", "get": "GET"}


def version_2(kinds: Iterable[Kind]) -> Obj:
    """/openapi/v2."""
    return {
        "swagger": "2.0",
        "info": {"title": TITLE, "version": VERSION},
        "paths": _paths(kinds),
        "definitions": {},
        "parameters": {},
        "securityDefinitions": {
            "BearerToken": {"type": "apiKey", "name": "authorization", "in": "header"},
        },
        "security": [{"BearerToken": []}],
    }


def version_2_protobuf() -> bytes:
    """The same for clients that ask for protobuf alone (kubectl): without paths and definitions."""
    info = _field(1, TITLE.encode()) + _field(2, VERSION.encode())
    return _field(1, b"2.0") + _field(2, info) + _field(8, b"")


def version_3(kinds: Iterable[Kind]) -> Obj:
    """/openapi/v3/apis/GROUP/VERSION."""
    return {
        "openapi": "3.0.0",
        "info": {"title": TITLE, "version": VERSION},
        "paths": _paths(kinds),
        "components": {"schemas": {}},
    }


def _field(number: int, value: bytes) -> bytes:
    """A field of a message that is a message or text, shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


def _paths(kinds: Iterable[Kind]) -> Obj:
    found: Obj = {}
    for kind in kinds:
        root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
        collection = (
            f"{root}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"{root}/{kind.plural}"
        )
        for path, verbs in (
            (collection, {"create"}),
            (f"{collection}/{{name}}", {"get", "update", "patch", "delete"}),
        ):
            operations = {
                _VERBS[verb].lower(): _operation(kind, _VERBS[verb]) for verb in verbs if verb in kind.verbs
            }
            if operations:
                found[path] = operations
    return found


def _operation(kind: Kind, method: str) -> Obj:
    gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in _PARAMETERS.get(method, ())
    ]
    answers = {"200": {"description": "OK"}}
    return {"parameters": parameters, "responses": answers, "x-kubernetes-group-version-kind": gvk}
