"""Another network's configuration with our plugin in it.

Needs: nothing.   Gives: find_target, splice, NoTargetError.
Source: Cilium 1.17, the CNI configuration manager: chaining onto a target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from cells.cni.config.templates import Plugin
from lifecycle.settings import read_regular

SUFFIXES: Final = (".conflist", ".conf", ".json", ".cilium_bak")
"""A configuration that an exclusive agent renamed still counts as a network."""

_BLANKS = " \t\r\n"
_decode = json.JSONDecoder().raw_decode


class NoTargetError(Exception):
    """No configuration of that network is there yet."""

    def __init__(self) -> None:
        super().__init__(
            "could not find existing CNI config for chaining: no matching CNI configurations found"
            " (will retry)"
        )


def find_target(directory: Path, network: str, own: str, skipped: Callable[[str], None]) -> str:
    """The text of the network's configuration, as a list of plugins; ``*`` is the first there is.

    Files are taken by name, without ``own``; what cannot be read goes to ``skipped``, a line each.
    Raises NoTargetError, OSError for the directory.
    """
    for path in sorted(directory.iterdir()):
        if path.name == own or path.suffix not in SUFFIXES:
            continue
        try:
            text = read_regular(path).decode()
            found = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            skipped(f"{path}: {error}")
            continue
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            continue
        if network not in {"*", found["name"]}:
            continue
        if isinstance(found.get("plugins"), list) and found["plugins"]:
            return text
        return json.dumps(_listed(found, network), indent=2) + "\n"
    raise NoTargetError


def _listed(single: dict[str, Any], network: str) -> dict[str, Any]:
    """A configuration of one plugin as a list. It keeps its own name: ``*`` is none."""
    name = single["name"] if network == "*" else network
    return {"name": name, "cniVersion": single.get("cniVersion", "0.3.1"), "plugins": [single]}


def splice(text: str, ours: Plugin) -> str:
    """The list with our plugin in the place of an entry of our type, or at the end; else byte for byte.

    ``text`` is a JSON object with a non-empty ``plugins``.
    """
    entry = json.dumps(ours)
    end = 0
    for begin, end, plugin in _plugins(text):
        if isinstance(plugin, dict) and plugin.get("type") == ours["type"]:
            return text[:begin] + entry + text[end:]
    return text[:end] + ", " + entry + text[end:]


def _plugins(text: str) -> Iterator[tuple[int, int, Any]]:
    """Where each entry of ``plugins`` begins and ends in the text, and what it is."""
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        key, at = _decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        if key == "plugins":
            break
        _, at = _decode(text, at)
        at = _next(text, at)
    at = _skip(text, at + 1)
    while text[at] != "]":
        plugin, end = _decode(text, at)
        yield at, end, plugin
        at = _next(text, end)


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _next(text: str, at: int) -> int:
    """Past a comma, if there is one."""
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at
