"""Compares a response's shape with the recorded one: same keys and JSON types; values may differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator

FREE = frozenset({"options", "allocations", "daemonConfigurationMap", "immutable", "stale"})
"""Objects with keys that are data."""


def kind(value: object) -> str:
    """Return the JSON type."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names = {dict: "object", list: "array", str: "string", type(None): "null"}
    return names[type(value)]


def is_zero(value: object) -> bool:
    """Return whether the Go server would omit the field (omitempty; an object counts by its members)."""
    if isinstance(value, dict):
        return all(is_zero(item) for item in value.values())
    return value in (None, "", 0, False, [])


def differences(recorded: object, got: object, absent: Collection[str], path: str = "") -> Iterator[str]:
    """Return missing fields and other types; ``absent`` are paths of parts this agent does not have.

    A path has the keys joined by ``/`` and ``[]`` for every element of an array.
    """
    if path in absent or recorded is None:
        return
    if kind(recorded) != kind(got):
        yield f"{path or '.'}: recorded {kind(recorded)}, got {kind(got)} {got!r}"
    elif isinstance(recorded, dict) and isinstance(got, dict):
        if path.rpartition("/")[2] in FREE:
            return
        for key, value in recorded.items():
            below = f"{path}/{key}" if path else key
            if key in got:
                yield from differences(value, got[key], absent, below)
            elif below not in absent and not is_zero(value):
                yield f"{below}: missing (recorded {value!r})"
    elif isinstance(recorded, list) and isinstance(got, list) and recorded:
        for item in got:
            yield from differences(recorded[0], item, absent, f"{path}[]")


def same_json(recorded: object, again: object, path: str = "") -> Iterator[str]:
    """Return how a re-serialised model differs from its source, except for vanished keys."""
    if isinstance(recorded, dict) and isinstance(again, dict):
        for key, value in again.items():
            if key not in recorded:
                yield f"{path}/{key}: appeared"
            else:
                yield from same_json(recorded[key], value, f"{path}/{key}")
    elif isinstance(recorded, list) and isinstance(again, list) and len(recorded) == len(again):
        for index, (before, after) in enumerate(zip(recorded, again, strict=True)):
            yield from same_json(before, after, f"{path}[{index}]")
    elif recorded != again or kind(recorded) != kind(again):
        yield f"{path}: {recorded!r} became {again!r}"
