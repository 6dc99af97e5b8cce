"""Get and list: selectors, paging, and the rules of resource versions.

Source: k8s.io/apimachinery/pkg/labels/selector.go, fields/selector.go.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from tests.support.apiserver import errors
from tests.support.apiserver.errors import FieldError, Obj, bad_request, forbidden, invalid, required
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.options import ListOptions, version_number
from tests.support.apiserver.rules import label_value_problem, qualified_name_problem
from tests.support.apiserver.store import Key

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

OPERATORS = {"In": True, "NotIn": True, "Exists": False, "DoesNotExist": False}
"""Those of LabelSelector objects, and whether they have values."""
_WORD = r"[^\s(),!=<>]+"
_SET = re.compile(rf"({_WORD})\s+(in|notin)\s*\(([^()!=<>]*)\)")
_COMPARED = re.compile(rf"({_WORD})\s*(==|=|!=|<|>)\s*((?:{_WORD})?)")
_NAMED = re.compile(rf"(!?)\s*({_WORD})")


class Requirement(NamedTuple):
    """One condition on one label."""

    key: str
    operator: str
    values: tuple[str, ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels fulfil it."""
        value = labels.get(self.key)
        if self.operator == "exists":
            return value is not None
        if self.operator == "!":
            return value is None
        if self.operator in {"notin", "!="}:
            return value not in self.values
        if self.operator in {"<", ">"}:
            return _compares(value, self.operator, int(self.values[0]))
        return value is not None and value in self.values


def _compares(value: str | None, operator: str, bound: int) -> bool:
    try:
        number = int(value or "")
    except ValueError:
        return False
    return number > bound if operator == ">" else number < bound


Labels = Callable[[Mapping[str, str]], bool]
Fields = list[tuple[str, bool, str]]
"""Field, whether it must be equal, value."""


def _requirement(text: str) -> Requirement:
    if match := _SET.fullmatch(text):
        key, operator = match[1], match[2]
        values = tuple(one.strip() for one in match[3].split(","))
    elif match := _COMPARED.fullmatch(text):
        key, operator, values = match[1], match[2], (match[3],)
    elif match := _NAMED.fullmatch(text):
        key, operator, values = match[2], match[1] or "exists", ()
    else:
        raise _unparsed(f"cannot understand '{text}'")
    if problem := qualified_name_problem(key):
        raise _unparsed(f"{key}: {problem}")
    for value in values:
        if operator in {"<", ">"} and not re.fullmatch(r"[-+]?\d+", value):
            raise _unparsed(f"{value}: for 'Gt', 'Lt' operators, the value must be an integer")
        if problem := label_value_problem(value):
            raise _unparsed(f"{value}: {problem}")
    return Requirement(key, operator, values)


def _unparsed(why: str) -> Exception:
    return bad_request(f"unable to parse requirement: {why}")


def label_selector(text: str) -> Labels | None:
    """Whether labels are selected; None selects everything. Raises StatusError 400."""
    if not text.strip():
        return None
    requirements = [_requirement(one.strip()) for one in re.split(r",(?![^(]*\))", text)]
    return lambda labels: all(one.matches(labels) for one in requirements)


def field_selector(text: str) -> Fields:
    """The conditions of a field selector. Raises StatusError 400."""
    found: Fields = []
    for term in re.split(r"(?<!\\),", text):
        if not term:
            continue
        match = re.search(r"==|!=|=", term)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{term}'")
        name, value = term[: match.start()], term[match.end() :]
        if bad := re.search(r"(?<!\\)[=,]", value):
            raise bad_request(f"invalid field selector: unescaped character in value: {ord(bad[0])}")
        value = re.sub(r"\\([\\=,])", r"\1", value)
        if name or value:
            found.append((name, match[0] != "!=", value))
    return found


def selector_errors(selector: Obj | None, at: str) -> list[FieldError]:
    """What is wrong with a LabelSelector object."""
    found = []
    for key, value in ((selector or {}).get("matchLabels") or {}).items():
        for text, problem in ((key, qualified_name_problem(key)), (value, label_value_problem(value))):
            if problem:
                found.append(invalid(f"{at}.matchLabels", text, problem))
    for number, one in enumerate((selector or {}).get("matchExpressions") or ()):
        where, operator = f"{at}.matchExpressions[{number}]", one.get("operator", "")
        if operator not in OPERATORS:
            found.append(invalid(f"{where}.operator", operator, "not a valid selector operator"))
        elif OPERATORS[operator] and not one.get("values"):
            found.append(required(f"{where}.values", "must be specified when `operator` is 'In' or 'NotIn'"))
        elif one.get("values") and not OPERATORS[operator]:
            found.append(forbidden(f"{where}.values", "may not be specified for this operator"))
        if problem := qualified_name_problem(one.get("key", "")):
            found.append(invalid(f"{where}.key", one.get("key", ""), problem))
    return found


Selects = Callable[[Obj], bool]


class Listed(NamedTuple):
    """A page of a list."""

    items: list[Obj]
    version: int
    continues: str
    remaining: int | None


def value_at(obj: Any, path: str) -> str:
    """A field as selectors compare it: text, empty when it is not set."""
    for name in path.split("."):
        obj = obj.get(name) if isinstance(obj, dict) else None
    if isinstance(obj, bool):
        return str(obj).lower()
    return "" if obj is None else str(obj)


def fields_known(kind: Kind) -> dict[str, str]:
    """What field selectors may ask of a kind: name -> path."""
    known = {"metadata.name": "metadata.name"}
    if kind.namespaced or kind.custom is not None or not kind.strategy.fields:
        known["metadata.namespace"] = "metadata.namespace"
    if kind.custom is not None:
        if not kind.namespaced:
            known.pop("metadata.namespace")
        for one in kind.custom.get("selectableFields") or ():
            path = one["jsonPath"].lstrip(".")
            known[path] = path
    return {**known, **kind.strategy.fields}


def checked_fields(kind: Kind, text: str) -> Fields:
    """A field selector for a kind. Raises StatusError 400."""
    wanted, known = field_selector(text), fields_known(kind)
    for name, _, _ in wanted:
        if name not in known:
            raise errors.bad_request(f"field label not supported: {name}")
    return [(known[name], equal, value) for name, equal, value in wanted]


def selects(kind: Kind, options: ListOptions) -> Selects | None:
    """Whether objects are asked for; None when all are. Raises StatusError 400."""
    labels, fields = label_selector(options.labels), checked_fields(kind, options.fields)
    if labels is None and not fields:
        return None
    empties = kind.strategy.selector_empty

    def selected(obj: Obj) -> bool:
        if labels is not None and not labels(obj["metadata"].get("labels") or {}):
            return False
        return all(
            ((value_at(obj, path) or empties.get(path, "")) == value) is equal
            for path, equal, value in fields
        )

    return selected


class Reads:
    """Answers reads from the store."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._store = server.store

    async def get(self, kind: Kind, namespace: str, name: str, version: str) -> Obj:
        """One object. Raises StatusError."""
        await self._reached(version_number(version))
        found = self._store.get(kind.storage, (namespace if kind.namespaced else "", name))
        if found is None:
            raise errors.not_found(kind.resource, name)
        return self._server.converted(found, kind)

    async def page(self, kind: Kind, namespace: str, options: ListOptions) -> Listed:
        """A page of objects. Raises StatusError."""
        selected = selects(kind, options)
        asked = version_number(options.version, listing=True)
        start = ""
        if options.continues:
            asked, start = self._resumed(options)
            exact = True
        else:
            exact = options.match == "Exact"
            if exact and asked > self._store.revision:
                raise errors.future_version(asked, self._store.revision)
            await self._reached(asked)
        objects, version = self._at(
            kind, asked if exact else 0, continued=bool(options.continues), start=start
        )
        collection = self._store.of(kind.storage)
        order = collection.order() if objects is collection.objects else sorted(objects)
        keys = [key for key in order if key[0] == namespace] if namespace else order
        if start:
            keys = [key for key in keys if _path(key, namespace) >= start]
        limit = 0 if options.version == "0" else options.limit
        return self._page(kind, keys, objects, namespace, selected, limit, version)

    def _page(
        self,
        kind: Kind,
        keys: list[Key],
        objects: dict[Key, Obj],
        namespace: str,
        selected: Selects | None,
        limit: int,
        version: int,
    ) -> Listed:
        items: list[Obj] = []
        for at, key in enumerate(keys):
            obj = self._server.converted(objects[key], kind)
            if selected is not None and not selected(obj):
                continue
            items.append(obj)
            if limit and len(items) == limit and at + 1 < len(keys):
                token = _token(version, _path(key, namespace) + "\0")
                return Listed(items, version, token, len(keys) - at - 1 if selected is None else None)
        return Listed(items, version, "", None)

    def _at(self, kind: Kind, revision: int, *, continued: bool, start: str) -> tuple[dict[Key, Obj], int]:
        collection = self._store.of(kind.storage)
        if not revision:
            return collection.objects, self._store.revision
        if revision < collection.snapshot_floor(cached=kind.strategy.cached):
            if continued:
                message = "The provided continue parameter is too old to display a consistent list result."
                raise errors.expired(message, _token(-1, start))
            raise errors.expired("The resourceVersion for the provided list is too old.")
        return collection.at(revision), revision

    def _resumed(self, options: ListOptions) -> tuple[int, str]:
        if options.version not in {"", "0"}:
            raise errors.bad_request("specifying resource version is not allowed when using continue")
        revision, start = _read_token(options.continues)
        return (max(revision, 0)), start

    async def _reached(self, version: int) -> None:
        if version > self._store.revision:
            await anyio.sleep(self._server.future_wait)
            raise errors.future_version(version, self._store.revision)


def _path(key: Key, namespace: str) -> str:
    return key[1] if namespace or not key[0] else f"{key[0]}/{key[1]}"


def _token(revision: int, start: str) -> str:
    body = json.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": start}, separators=(",", ":"))
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def _read_token(text: str) -> tuple[int, str]:
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        version, start, revision = found["v"], str(found["start"]), int(found["rv"])
    except (ValueError, KeyError, TypeError) as error:
        raise errors.bad_request(f"invalid continue token: {error}") from error
    if version != "meta.k8s.io/v1" or not start or ".." in start.split("/"):
        raise errors.bad_request(f"invalid continue token: {found}")
    return revision, start


def shown(obj: Obj, kind: Kind) -> Obj:
    """One object as it is answered."""
    if kind.custom is not None:
        body: Obj = _sorted(obj)
        return body
    body = {key: value for key, value in obj.items() if key not in {"kind", "apiVersion"}}
    return {"kind": kind.kind, "apiVersion": kind.api_version, **body}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(one) for one in value]
    return value


def as_list(page: Listed, kind: Kind) -> Obj:
    """A page as it is answered."""
    metadata: Obj = {"resourceVersion": str(page.version)}
    if page.continues:
        metadata["continue"] = page.continues
    elif kind.custom is not None:
        metadata["continue"] = ""
    if page.remaining is not None:
        metadata["remainingItemCount"] = page.remaining
    if kind.custom is not None:
        items = [shown(one, kind) for one in page.items]
        return {"apiVersion": kind.api_version, "items": items, "kind": kind.listed, "metadata": metadata}
    items = [
        {key: value for key, value in one.items() if key not in {"kind", "apiVersion"}} for one in page.items
    ]
    return {"kind": kind.listed, "apiVersion": kind.api_version, "metadata": metadata, "items": items}
