"""What a request is about, read from its path.

Gives: Target, target_of.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.support.apiserver.auth import Attributes
from tests.support.apiserver.options import truth
from tests.support.apiserver.wire import Request

VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
SPECIAL_SUBRESOURCES = ("status", "finalize")


class Target(NamedTuple):
    """A resource, or nothing of one: then only the path counts."""

    group: str = ""
    version: str = ""
    namespace: str = ""
    plural: str = ""
    name: str = ""
    subresource: str = ""
    rest: tuple[str, ...] = ()
    watch: bool = False
    legacy_watch: bool = False
    scoped: bool = False
    """Whether the path names a namespace."""

    @property
    def is_resource(self) -> bool:
        """Whether it names a resource."""
        return bool(self.plural)

    def attributes(self, request: Request) -> Attributes:
        """What has to be allowed."""
        if not self.is_resource:
            return Attributes(VERBS.get(request.method, request.method.lower()), path=request.path)
        verb = VERBS.get(request.method, "")
        name = self.name
        if self.watch:
            verb = "watch"
        elif verb == "get" and not name:
            verb = "list"
        elif verb == "delete" and not name:
            verb = "deletecollection"
        if not name and verb in {"list", "watch", "deletecollection"}:
            name = _selected_name(request.query.get("fieldSelector", ""))
        selector = request.query.get("fieldSelector", "")
        return Attributes(
            verb, self.group, self.plural, self.subresource, self.namespace, name, selector=selector
        )


def _selected_name(selector: str) -> str:
    for term in selector.split(","):
        field, equal, value = term.partition("=")
        if field == "metadata.name" and equal:
            return value.lstrip("=")
    return ""


def target_of(request: Request) -> Target:
    """The target of a request."""
    parts = request.path.split("/")[1:]
    if parts and parts[-1] == "" and len(parts) > 3:
        parts = parts[:-1]
    if parts[:1] == ["api"] and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return Target()
    legacy = rest[0] == "watch" and len(rest) > 1
    if legacy:
        rest = rest[1:]
    namespace, scoped = "", False
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in SPECIAL_SUBRESOURCES:
        namespace, rest, scoped = rest[1], rest[2:], True
    elif rest[0] == "namespaces" and len(rest) > 1:
        namespace = rest[1]
    plural, name, subresource = rest[0], _at(rest, 1), _at(rest, 2)
    collection = not name
    watch = legacy or (request.method == "GET" and collection and truth(request.query.get("watch")))
    return Target(
        group, version, namespace, plural, name, subresource, tuple(rest[3:]), watch, legacy, scoped
    )


def _at(parts: list[str], index: int) -> str:
    return parts[index] if index < len(parts) else ""
