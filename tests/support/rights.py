"""Compares the rules of roles with the rights that requests to an API server need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Right = tuple[str, str, str]
"""Group, resource (``pods``, ``nodes/status``) and verb."""

_PATH = re.compile(r"/(?:api/v1|apis/([^/]+)/[^/]+)(?:/namespaces/[^/]+(?=/))?/(\w+)(?:/([^/]+))?(?:/(\w+))?")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def rights(roles: Iterable[Mapping[str, Any]]) -> Iterator[Right]:
    """Return everything that the rules of roles allow; bindings are ignored."""
    for role in roles:
        for rule in role.get("rules") or ():
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    yield from ((group, resource, verb) for verb in rule["verbs"])


def asked(method: str, target: str) -> Right | None:
    """Return the right that a request needs; None for a path that is not an object."""
    path, _, query = target.partition("?")
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    group, resource, name, sub = match[1] or "", match[2], match[3], match[4]
    reads = "watch" if "watch=1" in query else "get" if name else "list"
    return group, f"{resource}/{sub}" if sub else resource, _VERBS.get(method, reads)


def unused(roles: Iterable[Mapping[str, Any]], requests: Iterable[tuple[str, str]]) -> set[Right]:
    """Return the rights of roles that no request needed. A watcher also lists, where no server streams."""
    used = {right for one in requests if (right := asked(*one)) is not None}
    lists = {(group, resource, "list") for group, resource, verb in used if verb == "watch"}
    return set(rights(roles)) - used - lists
