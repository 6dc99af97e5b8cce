"""Compares recorded load-balancing state with ours, with every id replaced by a name."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from typing import Any

Json = Any


def split_key(map_name: str, text: str) -> tuple[Any, int | str | None]:
    """Split a key into its identifying part and the rest: a slot, a backend, a range."""
    key = bytes.fromhex(text)
    if map_name.endswith("_services_v2"):
        length = len(key) - 8
        address = str(ipaddress.ip_address(key[:length]))
        port = int.from_bytes(key[length : length + 2], "big")
        return (address, port, key[length + 5]), int.from_bytes(key[length + 2 : length + 4], "little")
    if "backends_v3" in map_name:
        return int.from_bytes(key, "little"), None
    if "affinity_match" in map_name:
        return int.from_bytes(key[4:6], "big"), int.from_bytes(key[:4], "little")
    if "source_range" in map_name:
        return int.from_bytes(key[4:6], "big"), (key[0:4] + key[8:]).hex()
    if map_name.endswith(("reverse_nat", "maglev")):
        return int.from_bytes(key, "big"), None
    return text, None


class Names:
    """The names of ids, over all steps of one run of an agent."""

    def __init__(self) -> None:
        self.frontends: dict[int, str] = {}
        self.backends: dict[int, str] = {}

    def learn(self, state: Json) -> None:
        """Read the ids of a state."""
        for frontend in state["frontends"]:
            self.frontends[frontend["id"]] = frontend["addr"]
            for backend in frontend["backends"]:
                if backend:
                    self.backends[backend["id"]] = backend["addr"]
        for backend in state["backends"]:
            self.backends[backend["id"]] = backend["addr"]


def canonical(state: Json, names: Names) -> dict[str, Any]:
    """Return frontends and maps with names in place of ids, sorted."""
    found: dict[str, Any] = {"frontends": {}, "maps": {}}
    for frontend in state["frontends"]:
        shown = {key: value for key, value in frontend.items() if key not in ("id", "backends")}
        shown["backends"] = sorted(
            tuple(sorted((key, str(value)) for key, value in one.items() if key not in ("id", "refs")))
            for one in frontend["backends"]
            if one
        )
        found["frontends"][frontend["addr"]] = shown
    for map_name, entries in state["maps_after"].items():
        found["maps"][map_name] = _canonical_map(map_name, entries, names)
    return found


def _canonical_map(map_name: str, entries: dict[str, str], names: Names) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    slots: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
    for key_text, value_text in entries.items():
        if map_name.endswith("maglev"):
            found[names.frontends.get(int(key_text))] = True
            continue
        key, rest = split_key(map_name, key_text)
        value = bytes.fromhex(value_text)
        if map_name.endswith("_services_v2"):
            if rest:
                backend = names.backends.get(int.from_bytes(value[:4], "little"))
                slots[key].append((int(rest), (backend, value[8:10].hex())))
            else:
                found[key] = (value[:6].hex(), value[8:].hex())
        elif "backends_v3" in map_name:
            found[names.backends.get(key)] = value_text
        elif "affinity" in map_name:
            found[names.frontends.get(key), names.backends.get(int(rest or 0))] = value_text
        elif map_name.endswith("reverse_nat") or "source_range" in map_name:
            found[names.frontends.get(key), rest] = value_text
        else:
            found[key] = value_text
    for key, values in slots.items():
        found[key, "slots"] = sorted((value for _, value in values), key=str)
    return found


def differences(recorded: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return the differences as text."""
    return [
        f"{part} {key}: recorded {theirs.get(key)!r}, ours {own[part].get(key)!r}"
        for part, theirs in recorded.items()
        for key in {*theirs, *own[part]}
        if theirs.get(key) != own[part].get(key)
    ]
