"""Who owns which field: sets of paths, and their form in metadata.managedFields.

Gives: Path, FieldSet, fields_of, compare, to_v1, from_v1, show_path.
Source: sigs.k8s.io/structured-merge-diff, Kubernetes' server-side apply documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support.apiserver.errors import Obj
from tests.support.apiserver.types import Type

Path = tuple[str, ...]
"""Elements as fieldsV1 writes them: ``f:name``, ``k:{...}``, ``v:...``."""

FieldSet = set[Path]


class Comparison(NamedTuple):
    """What two objects differ in."""

    added: FieldSet
    modified: FieldSet
    removed: FieldSet


def compact(value: object) -> str:
    """JSON as it stands in keys."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True)


def item_key(item: Any, kind: Type) -> str | None:
    """The element of an item of a set or an associative list; None when it lacks its keys."""
    keys = kind.list_keys
    if not keys:
        return f"v:{compact(item)}"
    if not isinstance(item, dict) or kind.items is None:
        return None
    found = {}
    for key in keys:
        value = item.get(key, kind.items.key_default(key))
        if value is not None:
            found[key] = value
    return f"k:{compact(found)}" if found else None


def children(value: Any, kind: Type) -> list[tuple[str, Any, Type]] | None:
    """What is owned inside a value, with its elements; None when it is owned as a whole."""
    if isinstance(value, dict):
        if kind.atomic:
            return None
        return [(f"f:{name}", one, kind.field(name)) for name, one in value.items()]
    if isinstance(value, list) and kind.list_keys is not None:
        items = kind.items or Type({}, custom=True)
        keyed = [(item_key(one, kind), one) for one in value]
        return [(key, one, items) for key, one in keyed if key is not None]
    return None


def every(value: Any, kind: Type, at: Path = ()) -> Iterator[Path]:
    """Every path of a value, inner nodes too."""
    if at:
        yield at
    for element, one, of in children(value, kind) or ():
        yield from every(one, of, (*at, element))


def fields_of(value: Any, kind: Type, at: Path = ()) -> Iterator[Path]:
    """The paths an applied configuration sets: leaves, and the items of associative lists."""
    inside = children(value, kind)
    if inside is None or not inside:
        if at and not (inside == [] and isinstance(value, list)):
            yield at
        return
    if at and at[-1].startswith("k:"):
        yield at
    for element, one, of in inside:
        yield from fields_of(one, of, (*at, element))


def compare(old: Any, new: Any, kind: Type) -> Comparison:
    """What has to be done to come from one value to the other."""
    found = Comparison(set(), set(), set())
    _compare(old, new, kind, (), found)
    return found


def _compare(old: Any, new: Any, kind: Type, at: Path, found: Comparison) -> None:
    before, after = _inside(old, new, kind), _inside(new, old, kind)
    if before is None or after is None:
        if old != new and at:
            found.modified.add(at)
        return
    for element, (value, of) in after.items():
        path = (*at, element)
        if element in before:
            _compare(before[element][0], value, of, path, found)
        else:
            found.added.update(every(value, of, path))
    for element, (value, of) in before.items():
        if element not in after:
            found.removed.update(every(value, of, (*at, element)))


def _inside(value: Any, other: Any, kind: Type) -> dict[str, tuple[Any, Type]] | None:
    if value is None:
        value = type(other)() if isinstance(other, (dict, list)) else None
    inside = children(value, kind)
    return None if inside is None else {element: (one, of) for element, one, of in inside}


def to_v1(paths: FieldSet) -> Obj:
    """As ``fieldsV1``."""
    tree: Obj = {}
    inner = {path[:size] for path in paths for size in range(1, len(path))}
    for path in sorted(paths):
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        if path in inner:
            node["."] = {}
    return tree


def from_v1(tree: Obj, at: Path = ()) -> Iterator[Path]:
    """From ``fieldsV1``."""
    for element, below in tree.items():
        if element == ".":
            yield at
            continue
        path = (*at, element)
        if not below:
            yield path
        yield from from_v1(below, path)


def show_path(path: Path) -> str:
    """As messages tell of it: ``.spec.ports[name="a"].port``."""
    shown = ""
    for element in path:
        kind, _, rest = element.partition(":")
        if kind == "f":
            shown += f".{rest}"
        elif kind == "v":
            shown += f"[={rest}]"
        else:
            keys = json.loads(rest)
            shown += "[" + ",".join(f"{key}={compact(value)}" for key, value in keys.items()) + "]"
    return shown
