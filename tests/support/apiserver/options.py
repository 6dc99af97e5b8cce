"""The query parameters of reads and writes, checked as the server checks them.

Gives: ListOptions, list_options, write_options, delete_options, duration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.apiserver import errors
from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid, unsupported

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
    wrong = _watch_errors(found) if watch else _list_errors(found)
    if wrong:
        raise errors.unprocessable(META, "ListOptions", "", wrong)
    return found


def _watch_errors(options: ListOptions) -> list[FieldError]:
    name, found = "resourceVersionMatch", []
    if options.initial_events is not None:
        if options.match != "NotOlderThan":
            why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            found.append(forbidden(name, why))
    elif options.match:
        found.append(forbidden(name, f"{name} is forbidden for watch unless sendInitialEvents is provided"))
    if options.match and options.match != "NotOlderThan":
        found.append(unsupported(name, options.match, ["NotOlderThan"]))
    if options.continues:
        found.append(forbidden(name, f"{name} is forbidden when continue is provided"))
    return found


def _list_errors(options: ListOptions) -> list[FieldError]:
    name, found = "resourceVersionMatch", []
    if options.match:
        if not options.version:
            found.append(forbidden(name, f"{name} is forbidden unless resourceVersion is provided"))
        if options.continues:
            found.append(forbidden(name, f"{name} is forbidden when continue is provided"))
        if options.match not in {"Exact", "NotOlderThan"}:
            found.append(unsupported(name, options.match, ["Exact", "NotOlderThan", ""]))
        if options.match == "Exact" and options.version == "0":
            found.append(forbidden(name, f'{name} "exact" is forbidden for resourceVersion "0"'))
    if options.initial_events is not None:
        found.append(forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list"))
    return found


def version_number(text: str, *, watch: bool = False, listing: bool = False) -> int:
    """A resource version. Raises StatusError: 400 on a list, 500 elsewhere."""
    if not text:
        return 0
    if not re.fullmatch(r"\d+", text):
        why = f"resourceVersion: Invalid value: {json.dumps(text)}: strconv.ParseUint: parsing {json.dumps(text)}: invalid syntax"
        if listing and not watch:
            raise errors.bad_request(f"invalid resource version: {why}")
        raise errors.internal(why)
    return int(text)


def write_options(
    kind: str, query: Mapping[str, Any], dry_run: list[str] | None = None, *, applies: bool = False
) -> bool:
    """Whether a write is dry. ``kind`` is CreateOptions and the like. Raises StatusError."""
    wrong: list[FieldError] = []
    asked = dry_run if dry_run is not None else ([query["dryRun"]] if "dryRun" in query else [])
    if asked and asked != ["All"]:
        wrong.append(unsupported("dryRun", asked, ["All"]))
    manager = query.get("fieldManager", "")
    if applies and not manager:
        wrong.append(FieldError("required", "fieldManager", "is required for apply patch"))
    if len(manager.encode()) > 128:
        wrong.append(FieldError("toolong", "fieldManager", "may not be more than 128 bytes"))
    for at, letter in enumerate(manager):
        if not letter.isprintable():
            why = f"invalid character U+{ord(letter):04X} (at position {at})"
            shown = FieldError("invalid", "fieldManager", why, manager)
            wrong.append(shown)
            break
    if kind == "PatchOptions" and not applies and "force" in query:
        wrong.append(forbidden("force", "may not be specified for non-apply patch"))
    if query.get("fieldValidation", "") not in {"", "Ignore", "Warn", "Strict"}:
        wrong.append(
            unsupported("fieldValidation", query["fieldValidation"], ["", "Ignore", "Strict", "Warn"])
        )
    if wrong:
        raise errors.unprocessable(META, kind, "", wrong)
    return bool(asked)


def delete_options(query: Mapping[str, str], body: Any) -> Obj:
    """Of the body, or else of the query. Raises StatusError."""
    options: Obj = dict(body) if isinstance(body, dict) else {}
    if not options:
        if query.get("gracePeriodSeconds"):
            options["gracePeriodSeconds"] = integer(query["gracePeriodSeconds"])
        if "propagationPolicy" in query:
            options["propagationPolicy"] = query["propagationPolicy"]
        if "orphanDependents" in query:
            options["orphanDependents"] = truth(query["orphanDependents"])
        if "dryRun" in query:
            options["dryRun"] = [query["dryRun"]]
    wrong: list[FieldError] = []
    policy = options.get("propagationPolicy")
    if policy is not None and options.get("orphanDependents") is not None:
        why = "orphanDependents and deletionPropagation cannot be both set"
        wrong.append(invalid("propagationPolicy", policy, why))
    if policy is not None and policy not in {"Foreground", "Background", "Orphan"}:
        wrong.append(unsupported("propagationPolicy", policy, ["Foreground", "Background", "Orphan", "nil"]))
    if options.get("dryRun") and options["dryRun"] != ["All"]:
        wrong.append(unsupported("dryRun", options["dryRun"], ["All"]))
    if wrong:
        raise errors.unprocessable(META, "DeleteOptions", "", wrong)
    return options


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Seconds of a Go duration. Raises ValueError."""
    if not re.fullmatch(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))+)", text):
        raise ValueError(text)
    sign = -1 if text.startswith("-") else 1
    parts = re.findall(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)", text)
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
