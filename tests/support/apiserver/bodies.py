"""What requests carry: objects, patches, options of a delete.

Gives: decoded, loaded, patch_media, change, apply_body, delete_body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.apiserver import errors, protobuf
from tests.support.apiserver.decode import GoJSONError, load_yaml, loads
from tests.support.apiserver.errors import Obj, StatusError
from tests.support.apiserver.kinds import Kind, Registry
from tests.support.apiserver.patches import json_patch, merge_patch, strategic_patch
from tests.support.apiserver.wire import Request

JSON, YAML, PROTOBUF = "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"
JSON_PATCH, MERGE, STRATEGIC = (
    f"application/{one}+json" for one in ("json-patch", "merge-patch", "strategic-merge-patch")
)
APPLY = "application/apply-patch+yaml"


def _media(request: Request) -> str:
    return request.header("Content-Type").split(";")[0].strip()


def _unsupported() -> StatusError:
    message = (
        "the body of the request was in an unknown format - accepted media types include:"
        f" {JSON}, {YAML}, {PROTOBUF}"
    )
    return StatusError(415, "UnsupportedMediaType", message)


def loaded(request: Request) -> Any:
    """The body as JSON, YAML or protobuf. Raises StatusError, GoJSONError."""
    media = _media(request) or JSON
    if media == YAML:
        return load_yaml(request.body)
    if media == PROTOBUF:
        try:
            return protobuf.decoded(request.body)
        except protobuf.UnknownMessageError:
            raise _unsupported() from None
    if media != JSON:
        raise _unsupported()
    return loads(request.body)


def decoded(request: Request, kind: Kind, kinds: Registry) -> Obj:
    """The object of a create or an update. Raises StatusError."""
    try:
        body = loaded(request)
    except GoJSONError as error:
        raise _unrecognized(
            request.body, kind, f"couldn't get version/kind; json parse error: {error}"
        ) from error
    if body is None:
        body = {}
    if not isinstance(body, dict):
        told = {list: "array", str: "string", bool: "bool"}.get(type(body), "number")
        why = (
            f"json: cannot unmarshal {told} into Go value of type struct"
            ' { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
        )
        raise _unrecognized(request.body, kind, f"couldn't get version/kind; json parse error: {why}")
    _check_type(body, request, kind, kinds)
    return body


def _check_type(body: Obj, request: Request, kind: Kind, kinds: Registry) -> None:
    version, name = body.get("apiVersion"), body.get("kind")
    if kind.custom is not None:
        _check_custom_type(body, request, kind, kinds)
        return
    if name and name != kind.kind and (not version or version == kind.api_version):
        here = f'{name} in version "{kind.version}" cannot be handled as a {kind.kind}'
        package = kind.group.split(".")[0] or "core"
        raise errors.bad_request(
            f"{here}: converting (v1.{name}) to ({package}.{kind.kind}): unknown conversion"
        )
    if version and version != kind.api_version:
        shown = version.rpartition("/")[2]
        where = 'in scheme "pkg/api/legacyscheme/scheme.go:30"'
        raise errors.bad_request(
            f'{name} in version "{shown}" cannot be handled as a {kind.kind}: no kind "{name}" is registered for'
            f' version "{version}" {where}'
        )


def _check_custom_type(body: Obj, request: Request, kind: Kind, kinds: Registry) -> None:
    version, name = body.get("apiVersion"), body.get("kind")
    if not name or not version:
        what = "Kind" if not name else "apiVersion"
        text = request.body.decode("utf-8", "replace")
        raise _unrecognized(request.body, kind, f"Object '{what}' is missing in '{text}'")
    if version != kind.api_version:
        error = errors.bad_request(
            f"the API version in the data ({version}) does not match the expected API version ({kind.api_version})"
        )
        group, _, of = str(version).rpartition("/")
        if group == kind.group and kinds.get(group, of, kind.plural) is None:
            unknown = sorted(one for one in body if one not in {"apiVersion", "kind", "metadata"})
            if unknown:
                error.headers["Warning"] = "\r\nWarning: ".join(
                    f'299 - "unknown field \\"{one}\\""' for one in unknown
                )
        raise error
    if name != kind.kind:
        wrong = errors.invalid("kind", name, f"must be {kind.kind}")
        metadata = body.get("metadata") or {}
        raise errors.unprocessable(kind.group, name, metadata.get("name", ""), [wrong])


def _unrecognized(body: bytes, kind: Kind, why: str) -> StatusError:
    if body[:1] in {b"{", b'"', b"["} or not body:
        text = body.decode("utf-8", "replace")
        shown = text if len(text) <= 32 else text[:30] + " ..."
        if body[:1] in {b"[", b'"'}:
            shown = body.hex()
    else:
        shown = body.hex()
    return errors.bad_request(
        f"the object provided is unrecognized (must be of type {kind.kind}): {why} ({shown or '<empty>'})"
    )


def patch_media(request: Request, kind: Kind) -> str:
    """The type of a patch. Raises StatusError 415."""
    media = _media(request)
    known = [JSON_PATCH, MERGE, APPLY] if kind.custom is not None else [JSON_PATCH, MERGE, STRATEGIC, APPLY]
    if media in known:
        return media
    if media == STRATEGIC:
        listed = f"{JSON_PATCH}, {MERGE}, {APPLY}"
        message = f"the body of the request was in an unknown format - accepted media types include: {listed}"
        raise StatusError(415, "UnsupportedMediaType", message)
    raise StatusError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})


def change(request: Request, kind: Kind, media: str) -> Callable[[Obj], Obj]:
    """What a patch does to an object. Raises StatusError."""
    if media == JSON_PATCH:
        operations = _patch_json(request.body, "error decoding patch: ")
        return lambda live: _object(json_patch(live, operations))
    patch = _patch_json(request.body, "" if media == STRATEGIC else "error decoding patch: ")
    if not isinstance(patch, dict):
        told = "array" if isinstance(patch, list) else "string" if isinstance(patch, str) else "number"
        prefix = "" if media == STRATEGIC else "error decoding patch: "
        raise errors.bad_request(
            f"{prefix}json: cannot unmarshal {told} into Go value of type map[string]interface {{}}"
        )
    if media == MERGE:
        return lambda live: _object(merge_patch(live, patch))
    return lambda live: _object(strategic_patch(live, patch, kind.type))


def _object(value: Any) -> Obj:
    if not isinstance(value, dict):
        raise errors.bad_request("json: cannot unmarshal into Go value")
    return value


def _patch_json(body: bytes, prefix: str) -> Any:
    try:
        return loads(body)
    except GoJSONError as error:
        raise errors.bad_request(f"{prefix}{error}") from error


def apply_body(request: Request, kind: Kind) -> Obj:
    """The configuration of a server-side apply. Raises StatusError."""
    body = load_yaml(request.body)
    if not isinstance(body, dict):
        raise errors.bad_request("error decoding YAML: expected an object")
    version, name = body.get("apiVersion", ""), body.get("kind", "")
    if version != kind.api_version or name != kind.kind:
        group, _, of = version.rpartition("/")
        raise errors.bad_request(f"invalid object type: {group}/{of}, Kind={name}")
    return body


def delete_body(request: Request) -> Any:
    """The options of a delete, if the body has any. Raises StatusError."""
    if not request.body:
        return None
    try:
        body = loaded(request)
    except GoJSONError as error:
        raise errors.bad_request(f"{error}") from error
    if isinstance(body, dict):
        kind, version = body.get("kind"), body.get("apiVersion")
        if kind and kind != "DeleteOptions":
            where = 'in scheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme/register.go:27"'
            raise errors.bad_request(f'no kind "{kind}" is registered for version "{version}" {where}')
    return body
