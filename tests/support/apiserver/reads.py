"""Get and list, with paging and the rules of resource versions.

Gives: Reads, shown, listed, object_fields.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from tests.support.apiserver import errors
from tests.support.apiserver.decode import GoJSONError, loads
from tests.support.apiserver.errors import Obj
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.options import ListOptions, version_number
from tests.support.apiserver.selectors import Fields, field_selector, label_selector
from tests.support.apiserver.store import Key

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

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
            if kind.strategy.fields or kind.custom is not None:
                raise errors.bad_request(f"field label not supported: {name}")
            raise errors.bad_request(
                f'"{name}" is not a known field selector: only "metadata.name", "metadata.namespace"'
            )
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
        keys = sorted(key for key in objects if not namespace or key[0] == namespace)
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
                message = (
                    "The provided continue parameter is too old to display a consistent list result. You can start a"
                    " new list without the continue parameter, or use the continue token in this response to retrieve"
                    " the remainder of the results. Continuing with the provided token results in an inconsistent"
                    " list - objects that were created, modified, or deleted between the time the first chunk was"
                    " returned and now may show up in the list."
                )
                raise errors.gone(message, _token(-1, start))
            raise errors.gone("The resourceVersion for the provided list is too old.")
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
    why = "invalid continue token: continue key is not valid: "
    try:
        body = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        found = loads(body)
    except binascii.Error as error:
        raise errors.bad_request(f"{why}{error}") from error
    except GoJSONError as error:
        raise errors.bad_request(f"{why}{error}") from error
    if found.get("v") != "meta.k8s.io/v1":
        raise errors.bad_request(f"{why}server does not recognize this encoded version {found.get('v')}")
    start = str(found.get("start", ""))
    if not start:
        raise errors.bad_request(f"{why}encoded start key empty (version meta.k8s.io/v1)")
    if ".." in start.split("/"):
        raise errors.bad_request(f"{why}{start}")
    return int(found.get("rv", 0)), start


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
