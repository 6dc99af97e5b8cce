"""The difference of two graphs."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from lifecycle.graph.parts import Parts

__all__ = ["KINDS", "Change", "ChangedField", "diff"]

KINDS = ("modules", "constructors", "edges", "invokes", "settings", "hooks")

_MOVES = {"file", "line", "built"}
"""Fields that are not compared: every edit above a line moves it, and `built` follows from edges and invokes.
"""


class ChangedField(msgspec.Struct, frozen=True):
    """One field of a part that is in both graphs."""

    field: str
    before: Any
    after: Any


class Change(msgspec.Struct, frozen=True):
    """A part that is only in the first graph (removed), only in the second (added), or differs."""

    kind: str
    id: str
    what: str
    """added, removed or changed."""
    altered: tuple[ChangedField, ...] = ()


def diff(before: Parts, after: Parts) -> list[Change]:
    """Return all changes, kind by kind, in the order of the graphs. Source places are not compared."""
    changes = []
    for kind in KINDS:
        old, new = _by_id(getattr(before, kind)), _by_id(getattr(after, kind))
        for name in (*old, *(name for name in new if name not in old)):
            if name not in new:
                changes.append(Change(kind, name, "removed"))
            elif name not in old:
                changes.append(Change(kind, name, "added"))
            elif altered := tuple(_altered(old[name], new[name])):
                changes.append(Change(kind, name, "changed", altered))
    return changes


def _by_id(structs: Iterable[msgspec.Struct]) -> Mapping[str, dict[str, Any]]:
    by_id: dict[str, dict[str, Any]] = {}
    for struct in structs:
        fields = msgspec.to_builtins(struct)
        if "from" in fields:
            role = "after" if fields["order"] else fields["parameter"]
            name = f"{fields['from']} -> {fields['to']} ({role})"
        elif "struct" in fields:
            name = fields["name"]
        else:
            name = fields["id"]
        by_id[name] = fields
    return by_id


def _altered(old: dict[str, Any], new: dict[str, Any]) -> Iterable[ChangedField]:
    for field in dict.fromkeys((*old, *new)):
        if field not in _MOVES and old.get(field) != new.get(field):
            yield ChangedField(field, old.get(field), new.get(field))
