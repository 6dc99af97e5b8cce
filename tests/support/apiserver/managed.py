"""metadata.managedFields: kept by every write, and the conflicts and merges of server-side apply.

Gives: Managers, after_update, apply, Merge.
Source: Kubernetes, k8s.io/apimachinery/pkg/util/managedfields; structured-merge-diff/merge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.apiserver.errors import Obj, StatusError, internal
from tests.support.apiserver.fields import (
    FieldSet,
    Path,
    children,
    compare,
    fields_of,
    from_v1,
    item_key,
    show_path,
    to_v1,
)
from tests.support.apiserver.types import Type

NEVER_OWNED: frozenset[Path] = frozenset(
    (
        ("f:apiVersion",),
        ("f:kind",),
        ("f:metadata",),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                "name",
                "namespace",
                "creationTimestamp",
                "selfLink",
                "uid",
                "clusterName",
                "generation",
                "managedFields",
                "resourceVersion",
            )
        ),
    )
)


class Manager(NamedTuple):
    """One entry's key."""

    name: str
    operation: str
    version: str
    subresource: str

    @property
    def shown(self) -> str:
        """As a conflict names it."""
        shown = f'"{self.name}"'
        if self.subresource:
            shown += f' with subresource "{self.subresource}"'
        return f"{shown} using {self.version}" if self.operation == "Update" else shown


class Entry(NamedTuple):
    """What one manager owns, and when it last wrote."""

    paths: FieldSet
    time: str


Managers = dict[Manager, Entry]


def managers_of(obj: Obj) -> Managers:
    """The entries of an object."""
    found: Managers = {}
    for entry in obj.get("metadata", {}).get("managedFields") or ():
        key = Manager(
            entry.get("manager", ""),
            entry.get("operation", ""),
            entry.get("apiVersion", ""),
            entry.get("subresource", ""),
        )
        found[key] = Entry(set(from_v1(entry.get("fieldsV1") or {})), entry.get("time", ""))
    return found


def with_managers(obj: Obj, managers: Managers) -> Obj:
    """The object with these entries."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    entries = []
    order = sorted(
        managers.items(),
        key=lambda one: (one[0].operation, one[1].time, one[0].name, one[0].version, one[0].subresource),
    )
    for key, entry in order:
        if not entry.paths:
            continue
        written: Obj = {
            "manager": key.name,
            "operation": key.operation,
            "apiVersion": key.version,
            "time": entry.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": to_v1(entry.paths),
        }
        if key.subresource:
            written["subresource"] = key.subresource
        entries.append(written)
    if entries:
        metadata["managedFields"] = entries
    return {**obj, "metadata": metadata}


def after_update(
    old: Obj, new: Obj, kind: Type, managers: Managers, who: Manager, now: str, reset: tuple[Path, ...] = ()
) -> Managers:
    """The entries after a write that is no apply."""
    changes = compare(_bare(old), _bare(new), kind)
    gone = changes.removed
    touched = _owned(changes.added | changes.modified, reset)
    result: Managers = {}
    for key, entry in managers.items():
        if key == who:
            continue
        left = entry.paths - gone - touched
        result[key] = entry if left == entry.paths else Entry(left, entry.time)
    before = managers.get(who, Entry(set(), now))
    mine = (before.paths | touched) - gone
    result[who] = Entry(mine, now if mine != before.paths or touched or gone else before.time)
    return result


def _bare(obj: Obj) -> Obj:
    metadata = {key: value for key, value in obj.get("metadata", {}).items() if key != "managedFields"}
    return {**obj, "metadata": metadata}


def _owned(paths: FieldSet, reset: tuple[Path, ...]) -> FieldSet:
    kept = {
        path for path in paths if path not in NEVER_OWNED and path[:2] not in NEVER_OWNED - {("f:metadata",)}
    }
    return {path for path in kept if not any(path[: len(one)] == one for one in reset)}


def check_applied(value: Any, kind: Type, where: str, at: str = "") -> None:
    """Refuse what the type does not have, as apply does. Raises StatusError 500."""
    problem = _problem(value, kind, at)
    if problem:
        raise internal(f"failed to create typed patch object ({where}): {problem}")


def _problem(value: Any, kind: Type, at: str) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return _map_problem(value, kind, at)
    if isinstance(value, list):
        return _list_problem(value, kind, at)
    if kind.name == "string" and not isinstance(value, str):
        return f"{at}: expected string, got &value.valueUnstructured{{Value:{_go(value)}}}"
    if kind.name in {"integer", "number", "boolean"} and isinstance(value, str):
        wanted = {"integer": "numeric (int or float)", "number": "numeric (int or float)"}.get(
            kind.name, kind.name
        )
        return f"{at}: expected {wanted}, got &value.valueUnstructured{{Value:{_go(value)}}}"
    return ""


def _map_problem(value: Obj, kind: Type, at: str) -> str:
    for name, one in value.items():
        if not kind.declares(name):
            return f"{at}.{name}: field not declared in schema"
        if problem := _problem(one, kind.field(name), f"{at}.{name}"):
            return problem
    return ""


def _list_problem(value: list[Any], kind: Type, at: str) -> str:
    keys = kind.list_keys
    seen = set()
    for number, one in enumerate(value):
        if keys is not None:
            key = item_key(one, kind)
            if key is None:
                shown = "[" + " ".join(f'"{name}"' for name in keys) + "]"
                return (
                    f"{at}: element {number}: associative list with keys has an element that omits all key fields"
                    f" {shown} (and doesn't have default values for any key fields)"
                )
            if key in seen:
                return f"{at}: duplicate entries for key {show_path((key,))}"
            seen.add(key)
        if kind.items is not None and (problem := _problem(one, kind.items, f"{at}[{number}]")):
            return problem
    return ""


def _go(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


class Merge(NamedTuple):
    """What an apply makes of an object."""

    obj: Obj
    managers: Managers


def apply(
    live: Obj,
    config: Obj,
    kind: Type,
    managers: Managers,
    who: Manager,
    now: str,
    *,
    force: bool,
    reset: tuple[Path, ...] = (),
) -> Merge:
    """Merge an applied configuration. Raises StatusError 409 when others own what it changes."""
    wanted = _owned(set(fields_of(_bare(config), kind)), reset)
    last = managers.get(who, Entry(set(), now)).paths
    merged = merge(_bare(live), config, kind)
    owned_elsewhere = set().union(*(entry.paths for key, entry in managers.items() if key != who))
    dropped = {path for path in last - wanted if path not in owned_elsewhere}
    merged = _without(merged, kind, dropped, wanted | owned_elsewhere)
    changes = compare(_bare(live), merged, kind)
    touched = changes.added | changes.modified
    clashes = {key: entry.paths & touched for key, entry in managers.items() if key != who}
    clashes = {key: paths for key, paths in clashes.items() if paths}
    if clashes and not force:
        raise _conflict(clashes)
    result: Managers = {}
    for key, entry in managers.items():
        left = entry.paths - changes.removed - clashes.get(key, set())
        result[key] = entry if left == entry.paths else Entry(left, entry.time)
    before = managers.get(who)
    changed = before is None or before.paths != wanted or merged != _bare(live)
    result[who] = Entry(wanted, now if changed or before is None else before.time)
    return Merge(merged, result)


def _conflict(clashes: dict[Manager, FieldSet]) -> StatusError:
    count = sum(map(len, clashes.values()))
    texts, causes = [], []
    ordered = sorted(clashes.items(), key=lambda one: one[0].shown)
    for key, paths in ordered:
        shown = sorted(map(show_path, paths))
        causes += [
            {"reason": "FieldManagerConflict", "message": f"conflict with {key.shown}", "field": one}
            for one in shown
        ]
        if count == 1:
            texts.append(f"conflict with {key.shown}: {shown[0]}")
        else:
            texts.append(f"conflicts with {key.shown}:\n" + "\n".join(f"- {one}" for one in shown))
    word = "conflict" if count == 1 else "conflicts"
    message = f"Apply failed with {count} {word}: " + "\n".join(texts)
    return StatusError(409, "Conflict", message, {"causes": causes})


def merge(live: Any, config: Any, kind: Type) -> Any:
    """The live value with the configuration's laid over it."""
    if isinstance(config, dict) and isinstance(live, dict) and not kind.atomic:
        made = dict(live)
        for name, value in config.items():
            made[name] = merge(live.get(name), value, kind.field(name))
        return made
    if isinstance(config, list) and isinstance(live, list) and kind.list_keys is not None:
        return _merged_list(live, config, kind)
    return config


def _merged_list(live: list[Any], config: list[Any], kind: Type) -> list[Any]:
    items = kind.items or Type({}, custom=True)
    wanted = {item_key(one, kind): one for one in config}
    made = []
    for one in live:
        key = item_key(one, kind)
        made.append(merge(one, wanted.pop(key), items) if key in wanted else one)
    return [*made, *wanted.values()]


def _without(value: Any, kind: Type, dropped: FieldSet, kept: FieldSet, at: Path = ()) -> Any:
    """The value without dropped paths, as far as nobody keeps what is below them."""
    inside = children(value, kind)
    if inside is None:
        return value
    held = {path[: len(at) + 1] for path in kept}
    held |= {path[: len(at) + 1] for path in kept if path[: len(at)] == at}
    left: dict[str, Any] = {}
    for element, one, of in inside:
        path = (*at, element)
        if path in dropped and path not in held:
            continue
        pruned = _without(one, of, dropped, kept, path)
        emptied = pruned in ({}, []) and one not in ({}, []) and path not in held
        below = any(gone[: len(path)] == path for gone in dropped)
        if not (emptied and below):
            left[element] = pruned
    if isinstance(value, dict):
        return {element[2:]: one for element, one in left.items()}
    return list(left.values())
