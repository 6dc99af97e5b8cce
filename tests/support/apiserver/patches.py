"""JSON patch (RFC 6902), JSON merge patch (RFC 7386) and strategic merge patch.

Gives: json_patch, merge_patch, strategic_patch.
"""

from __future__ import annotations

from typing import Any

from tests.support.apiserver.errors import Obj, StatusError, bad_request, internal
from tests.support.apiserver.types import Type

MAX_OPERATIONS = 10000


def rejected() -> StatusError:
    """422 of a patch that cannot be applied, which says nothing of why."""
    message = "the server rejected our request due to an error in our request"
    return StatusError(422, "Invalid", message, {})


def json_patch(obj: Obj, operations: Any) -> Any:
    """The object patched. Raises StatusError."""
    if not isinstance(operations, list):
        what = (
            "object"
            if isinstance(operations, dict)
            else "string"
            if isinstance(operations, str)
            else "number"
        )
        raise bad_request(
            f"error decoding patch: json: cannot unmarshal {what} into Go value of type []handlers.jsonPatchOp"
        )
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
    """The value merged as the type tells. Raises StatusError 500 for a malformed patch."""
    directive = patch.get("$patch")
    if directive == "delete":
        return {}
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive is not None and directive != "merge":
        raise internal(f"unknown patch type: {directive} in map: {_go_map(patch)}")
    made = dict(obj) if isinstance(obj, dict) else {}
    if "$retainKeys" in patch:
        kept = set(patch["$retainKeys"])
        made = {key: value for key, value in made.items() if key in kept}
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
            raise internal(f"map: {_go_map(one)} does not contain declared merge key: {key}")
        at = next((n for n, old in enumerate(made) if old.get(key) == one[key]), None)
        if one.get("$patch") == "delete":
            made = [old for old in made if old.get(key) != one[key]]
        elif at is None:
            made.append(strategic_patch({}, one, items))
        else:
            made[at] = strategic_patch(made[at], one, items)
    wanted = [one[key] for one in patch if one.get("$patch") != "delete"]
    known = {old.get(key) for old in before}
    fresh = [one for one in made if one.get(key) not in known]
    kept = [one for one in made if one.get(key) in known]
    del wanted
    return [*fresh, *kept] if fresh and kept else made


def _ordered(items: list[Any], order: list[Any], key: str | None) -> list[Any]:
    places = {(one.get(key) if isinstance(one, dict) else one): n for n, one in enumerate(order)}
    return sorted(
        items, key=lambda one: places.get(one.get(key) if isinstance(one, dict) else one, len(places))
    )


def _go_map(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    inside = " ".join(f"{key}:{_go_map(one)}" for key, one in sorted(value.items()))
    return f"map[{inside}]"
