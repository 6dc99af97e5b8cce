"""What requests carry: objects, options of a delete, and patches: JSON patch (RFC 6902), JSON merge patch (RFC 7386)
and strategic merge patch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.apiserver import errors, protobuf
from tests.support.apiserver.errors import Obj, StatusError, bad_request, internal
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.types import Type
from tests.support.apiserver.wire import Request

MAX_OPERATIONS = 10000


def rejected() -> StatusError:
    """422 of a patch that cannot be applied, without the reason."""
    message = "the server rejected our request due to an error in our request"
    return StatusError(422, "Invalid", message, {})


def json_patch(obj: Obj, operations: Any) -> Any:
    """The object patched. Raises StatusError."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: expected a list of operations")
    if len(operations) > MAX_OPERATIONS:
        message = (
            f"Request entity too large: The allowed maximum operations in a JSON patch is {MAX_OPERATIONS},"
            f" got {len(operations)}"
        )
        raise StatusError(413, "RequestEntityTooLarge", message)
    document: Any = _copy(obj)
    for operation in operations:
        document = _operate(document, operation)
    return document


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copy(one) for one in value]
    return value


def _tokens(path: Any) -> list[str]:
    if not isinstance(path, str):
        raise rejected()
    return [one.replace("~1", "/").replace("~0", "~") for one in path.split("/")[1:]]


def _operate(document: Any, operation: Obj) -> Any:
    name, path = operation.get("op"), _tokens(operation.get("path"))
    if name == "test":
        found = _find(document, path, missing=None)
        if found != operation.get("value"):
            raise rejected()
        return document
    if name in {"add", "replace"}:
        return _put(document, path, operation.get("value"), insert=name == "add")
    if name == "remove":
        return _remove(document, path)
    if name in {"move", "copy"}:
        source = _tokens(operation.get("from"))
        value = _copy(_find(document, source))
        if name == "move":
            document = _remove(document, source)
        return _put(document, path, value, insert=True)
    raise rejected()


_NONE: Any = object()


def _find(document: Any, path: list[str], missing: Any = _NONE) -> Any:
    for token in path:
        if isinstance(document, dict) and token in document:
            document = document[token]
        elif isinstance(document, list) and token.isdigit() and int(token) < len(document):
            document = document[int(token)]
        elif missing is _NONE:
            raise rejected()
        else:
            return missing
    return document


def _put(document: Any, path: list[str], value: Any, *, insert: bool) -> Any:
    if not path:
        return value
    parent, last = _find(document, path[:-1]), path[-1]
    if isinstance(parent, dict):
        parent[last] = value
    elif isinstance(parent, list):
        _put_item(parent, last, value, insert=insert)
    else:
        raise rejected()
    return document


def _put_item(parent: list[Any], last: str, value: Any, *, insert: bool) -> None:
    if last == "-":
        parent.append(value)
        return
    if not last.isdigit() or int(last) > len(parent) - (0 if insert else 1):
        raise rejected()
    if insert:
        parent.insert(int(last), value)
    else:
        parent[int(last)] = value


def _remove(document: Any, path: list[str]) -> Any:
    if not path:
        raise rejected()
    parent, last = _find(document, path[:-1]), path[-1]
    if isinstance(parent, dict) and last in parent:
        del parent[last]
    elif isinstance(parent, list) and last.isdigit() and int(last) < len(parent):
        del parent[int(last)]
    else:
        raise rejected()
    return document


def merge_patch(obj: Any, patch: Any) -> Any:
    """The value merged."""
    if not isinstance(patch, dict):
        return patch
    made = dict(obj) if isinstance(obj, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merge_patch(made.get(name), value)
    return made


def strategic_patch(obj: Any, patch: Obj, kind: Type) -> Any:
    """The value merged according to the type. Raises StatusError 500 for a malformed patch."""
    directive = patch.get("$patch")
    if directive == "delete":
        return {}
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive is not None and directive != "merge":
        raise internal(f"unknown patch type: {directive} in map")
    made = dict(obj) if isinstance(obj, dict) else {}
    if "$retainKeys" in patch:
        retained = set(patch["$retainKeys"])
        made = {key: value for key, value in made.items() if key in retained}
    for name, value in patch.items():
        if name in {"$patch", "$retainKeys"} or name.startswith("$setElementOrder/"):
            continue
        if name.startswith("$deleteFromPrimitiveList/"):
            target = name.partition("/")[2]
            made[target] = [one for one in made.get(target, []) if one not in value]
            continue
        _strategic_field(made, name, value, kind.field(name))
    for name, order in patch.items():
        if name.startswith("$setElementOrder/"):
            target = name.partition("/")[2]
            made[target] = _ordered(made.get(target, []), order, kind.field(target).patch_key)
    return made


def _strategic_field(made: Obj, name: str, value: Any, of: Type) -> None:
    if value is None:
        made.pop(name, None)
    elif isinstance(value, dict):
        if name in made or _has_directives(value):
            before = made.get(name)
            made[name] = strategic_patch(before if isinstance(before, dict) else {}, value, of)
            if value.get("$patch") == "delete":
                made.pop(name)
        else:
            made[name] = strategic_patch({}, value, of)
    elif isinstance(value, list):
        made[name] = _strategic_list(made.get(name) or [], value, of)
    else:
        made[name] = value


def _has_directives(value: Obj) -> bool:
    return any(name.startswith("$") for name in value)


def _strategic_list(before: list[Any], patch: list[Any], of: Type) -> list[Any]:
    if any(isinstance(one, dict) and one.get("$patch") == "replace" for one in patch):
        return [one for one in patch if not (isinstance(one, dict) and "$patch" in one)]
    key = of.patch_key
    if key is None:
        return [one for one in patch if not (isinstance(one, dict) and "$patch" in one)]
    if not key:
        return [*patch, *(one for one in before if one not in patch)] if before else list(patch)
    return _merged_items(before, patch, of, key)


def _merged_items(before: list[Any], patch: list[Any], of: Type, key: str) -> list[Any]:
    items = of.items or Type({}, custom=True)
    made = list(before)
    for one in patch:
        if not isinstance(one, dict) or key not in one:
            raise internal(f"a map does not contain declared merge key: {key}")
        at = next((n for n, old in enumerate(made) if old.get(key) == one[key]), None)
        if one.get("$patch") == "delete":
            made = [old for old in made if old.get(key) != one[key]]
        elif at is None:
            made.append(strategic_patch({}, one, items))
        else:
            made[at] = strategic_patch(made[at], one, items)
    known = {old.get(key) for old in before}
    fresh = [one for one in made if one.get(key) not in known]
    retained = [one for one in made if one.get(key) in known]
    return [*fresh, *retained] if fresh and retained else made


def _ordered(items: list[Any], order: list[Any], key: str | None) -> list[Any]:
    places = {(one.get(key) if isinstance(one, dict) else one): n for n, one in enumerate(order)}
    return sorted(
        items, key=lambda one: places.get(one.get(key) if isinstance(one, dict) else one, len(places))
    )


JSON, PROTOBUF = "application/json", "application/vnd.kubernetes.protobuf"
APPLY = "application/apply-patch+yaml"
JSON_PATCH, MERGE, STRATEGIC = (
    f"application/{one}+json" for one in ("json-patch", "merge-patch", "strategic-merge-patch")
)


def _media(request: Request) -> str:
    return request.header("Content-Type").split(";")[0].strip() or JSON


def _unsupported(*known: str) -> StatusError:
    message = (
        f"the body of the request was in an unknown format - accepted media types include: {', '.join(known)}"
    )
    return StatusError(415, "UnsupportedMediaType", message)


def loaded(request: Request) -> Any:
    """The body as JSON, or as protobuf that Helm sends. Raises StatusError."""
    media = _media(request)
    if media == PROTOBUF:
        try:
            return protobuf.decoded(request.body)
        except protobuf.UnknownMessageError:
            raise _unsupported(JSON) from None
    if media != JSON:
        raise _unsupported(JSON)
    return _parsed(request.body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        raise errors.bad_request(f"json parse error: {error}") from error


def decoded(request: Request, kind: Kind) -> Obj:
    """The object of a create or an update: of the kind that the path names. Raises StatusError."""
    body = loaded(request)
    if body is None:
        body = {}
    if not isinstance(body, dict):
        raise errors.bad_request(f"the object provided is unrecognized (must be of type {kind.kind})")
    version, name = body.get("apiVersion"), body.get("kind")
    if kind.custom is None:
        version, name = version or kind.api_version, name or kind.kind
    elif not name or not version:
        raise errors.bad_request(f"Object '{'apiVersion' if name else 'Kind'}' is missing")
    if version != kind.api_version:
        raise errors.bad_request(
            f"the API version in the data ({version}) does not match the expected API version ({kind.api_version})"
        )
    if name == kind.kind:
        return body
    if kind.custom is None:
        raise errors.bad_request(f"{name} cannot be handled as a {kind.kind}")
    wrong = errors.invalid("kind", name, f"must be {kind.kind}")
    raise errors.unprocessable(kind.group, name, (body.get("metadata") or {}).get("name", ""), [wrong])


def change(request: Request, kind: Kind) -> Callable[[Obj], Obj]:
    """What a patch does to an object. Raises StatusError."""
    media = _media(request)
    known = [JSON_PATCH, MERGE, *([STRATEGIC] if kind.custom is None else [])]
    if media not in known:
        raise _unsupported(*known)
    patch = _parsed(request.body)
    if media == JSON_PATCH:
        return lambda live: _object(json_patch(live, patch))
    _object(patch)
    if media == MERGE:
        return lambda live: _object(merge_patch(live, patch))
    return lambda live: _object(strategic_patch(live, patch, kind.type))


def applied(request: Request) -> Obj | None:
    """The configuration of a server-side apply; None of other patches. Raises StatusError."""
    return _object(_parsed(request.body)) if _media(request) == APPLY else None


def apply_patch(live: Any, config: Any, last: Any, kind: Type) -> Any:
    """A value with a configuration laid over it, without what only the last configuration had."""
    if isinstance(config, dict) and isinstance(live, dict):
        before = last if isinstance(last, dict) else {}
        made = {key: value for key, value in live.items() if key in config or key not in before}
        for key, value in config.items():
            made[key] = apply_patch(live.get(key), value, before.get(key), kind.field(key))
        return made
    if isinstance(config, list) and isinstance(live, list) and kind.list_keys is not None:
        found, wanted, before = (_keyed(one, kind) for one in (live, config, last or []))
        names = [one for one in found if one in wanted or one not in before]
        names += [one for one in wanted if one not in found]
        of = kind.items or Type({}, custom=True)
        return [
            apply_patch(found.get(one), wanted[one], before.get(one), of) if one in wanted else found[one]
            for one in names
        ]
    return config


def _keyed(items: list[Any], kind: Type) -> dict[str, Any]:
    keys = kind.list_keys or ()
    return {
        str([one.get(key, {"protocol": "TCP"}.get(key)) for key in keys] if keys else one): one
        for one in items
    }


def _object(value: Any) -> Obj:
    if not isinstance(value, dict):
        raise errors.bad_request("error decoding patch: expected an object")
    return value


def delete_body(request: Request) -> Any:
    """The options of a delete, if the body has any. Raises StatusError."""
    body = loaded(request) if request.body else None
    if isinstance(body, dict) and body.get("kind", "DeleteOptions") != "DeleteOptions":
        raise errors.bad_request(f'no kind "{body["kind"]}" is registered for options of a delete')
    return body
