"""What a request is about: its path, and the query parameters of reads and writes, checked as the server does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.apiserver import errors
from tests.support.apiserver.auth import Attributes
from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid, unsupported
from tests.support.apiserver.wire import Request

META = "meta.k8s.io"


def truth(text: str | None) -> bool:
    """A boolean parameter: whatever is not false is true, nothing after the = too."""
    return text is not None and text not in {"0", "false", "False", "FALSE", "f", "F"}


def integer(text: str) -> int:
    """A number. Raises StatusError 400."""
    if not re.fullmatch(r"[-+]?\d+", text):
        raise errors.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text)


@dataclass
class ListOptions:
    """What a list or a watch asks for."""

    watch: bool = False
    version: str = ""
    match: str = ""
    labels: str = ""
    fields: str = ""
    limit: int = 0
    continues: str = ""
    timeout: int | None = None
    bookmarks: bool = False
    initial_events: bool | None = None

    @property
    def revision(self) -> int:
        """The version as a number, 0 for none."""
        return int(self.version or 0)


def list_options(query: Mapping[str, str], *, watch: bool) -> ListOptions:
    """Checked. Raises StatusError."""
    found = ListOptions(
        watch=watch,
        version=query.get("resourceVersion", ""),
        match=query.get("resourceVersionMatch", ""),
        labels=query.get("labelSelector", ""),
        fields=query.get("fieldSelector", ""),
        limit=max(0, integer(query["limit"])) if query.get("limit") else 0,
        continues=query.get("continue", ""),
        timeout=integer(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None,
        bookmarks=truth(query.get("allowWatchBookmarks")),
    )
    if "sendInitialEvents" in query:
        found.initial_events = truth(query["sendInitialEvents"])
    elif watch and found.bookmarks and found.version in {"", "0"} and not found.match and not found.continues:
        found.initial_events, found.match = True, "NotOlderThan"
    if wrong := list(_watch_errors(found) if watch else _list_errors(found)):
        raise errors.unprocessable(META, "ListOptions", "", wrong)
    return found


def _watch_errors(options: ListOptions) -> Iterator[FieldError]:
    name = "resourceVersionMatch"
    if options.initial_events is None and options.match:
        yield forbidden(name, f"{name} is forbidden for watch unless sendInitialEvents is provided")
    if options.initial_events is not None and options.match != "NotOlderThan":
        yield forbidden(name, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
    if options.match not in {"", "NotOlderThan"}:
        yield unsupported(name, options.match, ["NotOlderThan"])
    if options.continues:
        yield forbidden(name, f"{name} is forbidden when continue is provided")


def _list_errors(options: ListOptions) -> Iterator[FieldError]:
    name, match = "resourceVersionMatch", options.match
    for wrong, why in (
        (match and not options.version, "unless resourceVersion is provided"),
        (match and options.continues, "when continue is provided"),
        (match == "Exact" and options.version == "0", 'for resourceVersion "0"'),
    ):
        if wrong:
            yield forbidden(name, f"{name} is forbidden {why}")
    if match not in {"", "Exact", "NotOlderThan"}:
        yield unsupported(name, match, ["Exact", "NotOlderThan", ""])
    if options.initial_events is not None:
        yield forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list")


def version_number(text: str, *, watch: bool = False, listing: bool = False) -> int:
    """A resource version. Raises StatusError: 400 on a list, 500 elsewhere."""
    if not text:
        return 0
    if not re.fullmatch(r"\d+", text):
        why = f"invalid resource version: {text}"
        raise errors.bad_request(why) if listing and not watch else errors.internal(why)
    return int(text)


def write_options(kind: str, query: Mapping[str, Any]) -> bool:
    """Whether a write is dry. ``kind`` is CreateOptions and the like. Raises StatusError."""
    wrong: list[FieldError] = []
    if "dryRun" in query and query["dryRun"] != "All":
        wrong.append(unsupported("dryRun", query["dryRun"], ["All"]))
    if query.get("fieldValidation", "") not in {"", "Ignore", "Warn", "Strict"}:
        known = ["", "Ignore", "Strict", "Warn"]
        wrong.append(unsupported("fieldValidation", query["fieldValidation"], known))
    if wrong:
        raise errors.unprocessable(META, kind, "", wrong)
    return "dryRun" in query


def delete_options(query: Mapping[str, str], body: Any) -> Obj:
    """Of the body, or else of the query. Raises StatusError."""
    options: Obj = dict(body) if isinstance(body, dict) else {}
    if not options:
        for name, read in DELETE_OPTIONS.items():
            if name in query:
                options[name] = read(query[name])
    wrong: list[FieldError] = []
    policy = options.get("propagationPolicy")
    if policy is not None and options.get("orphanDependents") is not None:
        why = "orphanDependents and deletionPropagation cannot be both set"
        wrong.append(invalid("propagationPolicy", policy, why))
    if policy not in {None, "Foreground", "Background", "Orphan"}:
        wrong.append(unsupported("propagationPolicy", policy, ["Foreground", "Background", "Orphan", "nil"]))
    if options.get("dryRun") not in (None, [], ["All"]):
        wrong.append(unsupported("dryRun", options["dryRun"], ["All"]))
    if wrong:
        raise errors.unprocessable(META, "DeleteOptions", "", wrong)
    return options


DELETE_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "gracePeriodSeconds": integer,
    "propagationPolicy": str,
    "orphanDependents": truth,
    "dryRun": lambda text: [text],
}
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
        return Attributes(verb, self.group, self.plural, self.subresource, self.namespace, name)


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
    namespace, scoped = "", False
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in SPECIAL_SUBRESOURCES:
        namespace, rest, scoped = rest[1], rest[2:], True
    elif rest[0] == "namespaces" and len(rest) > 1:
        namespace = rest[1]
    plural, name, subresource = rest[0], _at(rest, 1), _at(rest, 2)
    collection = not name
    watch = request.method == "GET" and collection and truth(request.query.get("watch"))
    return Target(group, version, namespace, plural, name, subresource, tuple(rest[3:]), watch, scoped)


def _at(parts: list[str], index: int) -> str:
    return parts[index] if index < len(parts) else ""
