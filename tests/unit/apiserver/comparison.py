"""Compares a response with the recorded one: placeholders are bound, values that vary are ignored."""

from __future__ import annotations

import json
import re
from typing import Any

PLACEHOLDER = re.compile(r"<([A-Z][A-Z_0-9]*)(?::([^<>]*))?>")
LOOSE = {
    "TIME",
    "MICROTIME",
    "ETAG",
    "AGE",
    "HASH",
    "HTTPDATE",
    "VOLATILE",
    "CERT_ID",
    "CA_CERTIFICATE",
    "GIT_COMMIT",
    "BUILD_DATE",
    "GO_VERSION",
}
NUMBERS = {"NODEPORT"}


class Bound:
    """The values of placeholders in one scenario."""

    def __init__(self, tokens: dict[str, str]) -> None:
        self._values: dict[str, str] = {f"<TOKEN:{name}>": token for name, token in tokens.items()}
        self._loose: dict[str, str] = {}

    def fill(self, value: Any) -> Any:
        """Return a request with these values."""
        if isinstance(value, dict):
            return {self.fill(key): self.fill(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.fill(one) for one in value]
        if not isinstance(value, str):
            return value
        if match := re.fullmatch(r'\$elided: (\d+) times "(.+)"', value):
            return match[2] * int(match[1])
        whole = PLACEHOLDER.fullmatch(value)
        filled = PLACEHOLDER.sub(lambda found: self._values.get(found[0], found[0]), value)
        if whole and whole[1] in NUMBERS and filled.isdigit():
            return int(filled)
        if whole and filled.isdigit() and whole[1] == "RV":
            return filled
        return filled

    def text(self, recorded: str, got: str) -> bool:
        """Return whether a text matches the recorded one."""
        whole = PLACEHOLDER.fullmatch(recorded)
        if whole is not None and whole[1] in LOOSE:
            if whole[1] in {"TIME", "MICROTIME", "ETAG", "HASH"}:
                self._values.setdefault(recorded, got)
            return True
        pattern, names = "", []
        at = 0
        for match in PLACEHOLDER.finditer(recorded):
            pattern += re.escape(recorded[at : match.start()]) + r"(.+?)"
            names.append(match)
            at = match.end()
        found = re.fullmatch(pattern + re.escape(recorded[at:]), got, re.DOTALL)
        if found is None:
            return False
        for match, value in zip(names, found.groups(), strict=True):
            if match[1] in LOOSE:
                self._values.setdefault(match[0], value)
                continue
            if self._values.setdefault(match[0], value) != value:
                return False
        return True

    def newer(self, recorded: str, got: str) -> bool:
        """Return whether the version of a list or bookmark is at least the recorded one."""
        known = self._values.get(recorded)
        if known is None:
            if PLACEHOLDER.fullmatch(recorded):
                self._values[recorded] = got
            return got.isdigit()
        return got.isdigit() and int(got) >= int(known)


def differences(recorded: Any, got: Any, bound: Bound, *, at: str = "", listed: bool = False) -> list[str]:
    """Return where a response differs from the recorded one."""
    if isinstance(recorded, dict) and recorded.get("kind") == "Status" and isinstance(got, dict):
        return _status(recorded, got, bound, at)
    if isinstance(recorded, dict):
        return _object(recorded, got, bound, at, listed=listed)
    if isinstance(recorded, list):
        return _list(recorded, got, bound, at)
    if isinstance(recorded, str):
        return _text(recorded, got, bound, at, listed=listed)
    return (
        []
        if (recorded == got and type(recorded) is type(got)) or _number(recorded, got)
        else [_reported(at, recorded, got)]
    )


def _number(recorded: Any, got: Any) -> bool:
    numbers = (int, float)
    plain = not isinstance(recorded, bool) and not isinstance(got, bool)
    return plain and isinstance(recorded, numbers) and isinstance(got, numbers) and recorded == got


def _reported(at: str, recorded: Any, got: Any) -> str:
    return f"{at or 'body'}: recorded {str(recorded)[:600]!r}, got {str(got)[:600]!r}"


def _text(recorded: str, got: Any, bound: Bound, at: str, *, listed: bool) -> list[str]:
    if recorded.startswith("$elided"):
        return []
    whole = PLACEHOLDER.fullmatch(recorded)
    if whole is not None and whole[1] in NUMBERS:
        return (
            [] if isinstance(got, int) and bound.text(recorded, str(got)) else [_reported(at, recorded, got)]
        )
    if not isinstance(got, str):
        return [] if whole is not None and whole[1] in LOOSE else [_reported(at, recorded, got)]
    if at.endswith("metadata.resourceVersion") and listed:
        return [] if bound.newer(recorded, got) else [_reported(at, recorded, got)]
    return [] if bound.text(recorded, got) else [_reported(at, bound.fill(recorded), got)]


def _is_list(recorded: dict[str, Any]) -> bool:
    return str(recorded.get("kind", "")).endswith("List") or recorded.get("type") == "BOOKMARK"


def _object(recorded: dict[str, Any], got: Any, bound: Bound, at: str, *, listed: bool) -> list[str]:
    if not isinstance(got, dict):
        return [_reported(at, recorded, got)]
    if recorded.get("$elided") and set(recorded) == {"$elided"}:
        return []
    elided = "$elided" in recorded
    listed = listed or _is_list(recorded)
    found = []
    keys = {key: bound.fill(key) for key in recorded if key not in {"$elided", "managedFields"}}
    missing = sorted(key for key, filled in keys.items() if filled not in got)
    extra = sorted(set(got) - set(keys.values())) if not elided else []
    if missing or extra:
        found.append(f"{at or 'body'}: missing {missing}, extra {extra}")
    for key, filled in keys.items():
        if filled in got:
            inside = recorded[key]
            if elided and isinstance(inside, dict):
                inside = {"$elided": True, **inside}
            below = listed and key in {"metadata", "resourceVersion", "object"}
            found += differences(inside, got[filled], bound, at=f"{at}.{key}" if at else key, listed=below)
    return found


def _list(recorded: list[Any], got: Any, bound: Bound, at: str) -> list[str]:
    if not isinstance(got, list):
        return [_reported(at, recorded, got)]
    cut = bool(recorded) and isinstance(recorded[-1], dict) and set(recorded[-1]) == {"$elided"}
    wanted = recorded[:-1] if cut else recorded
    if (len(got) < len(wanted)) if cut else (len(got) != len(wanted)):
        return [f"{at}: recorded {len(wanted)} items, got {len(got)}: {str(wanted)[:300]} / {str(got)[:300]}"]
    found = []
    for number, (one, other) in enumerate(zip(wanted, got, strict=False)):
        found += differences(one, other, bound, at=f"{at}[{number}]")
    return found


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _by_manager(entries: list[Any]) -> list[Any]:
    return sorted(
        entries,
        key=lambda one: (one["operation"], one["manager"], one.get("subresource", ""), one["apiVersion"]),
    )


def _status(recorded: dict[str, Any], got: dict[str, Any], bound: Bound, at: str) -> list[str]:
    """Reduce an error to its code, reason and fields: the words vary by server."""
    found = [
        _reported(f"{at}.{key}" if at else key, recorded.get(key), got.get(key))
        for key in ("kind", "apiVersion", "status", "reason", "code")
        if recorded.get(key) != got.get(key)
    ]
    wanted, made = recorded.get("details") or {}, got.get("details") or {}
    for key in ("name", "group", "kind", "retryAfterSeconds"):
        if key in wanted:
            found += differences(wanted[key], made.get(key), bound, at=f"{at}.details.{key}")
    if (one := _causes(wanted)) != (other := _causes(made)):
        found.append(_reported(f"{at}.details.causes", sorted(one), sorted(other)))
    return found


def _causes(details: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one.get("reason", ""), one.get("field", "")) for one in details.get("causes") or ()}
