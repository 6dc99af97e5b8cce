"""Removes possible secrets from the content of a bundle: objects, JSON documents, logs.

Bundles are sent to others, so texts that look like a secret are removed, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

HIDDEN: Final = "(hidden)"
"""The replacement of secrets, as in settings."""
_SECRET_KEY: Final = re.compile(
    r"pass(word|wd|phrase)|secret|token|credential|authori[sz]ation|api[-_]?key|private[-_]?key|(^|[-_])psk$|"
    r"(^|[-_.])key[-_]?data$|client[-_]key|cookie|kubeconfig$",
    re.IGNORECASE,
)
"""Names of fields and variables with values that are removed."""
_HARMLESS_KEY: Final = re.compile(
    r"(name|namespace|ref|path|file|type|kind|version|count|expiration|seconds|mount)s?$|^automount",
    re.IGNORECASE,
)
"""Names of fields that only refer to a secret, or count."""
_TEXTS: Final = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        HIDDEN,
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), HIDDEN),  # JSON Web Tokens
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"), HIDDEN),  # of a URL
    (
        re.compile(
            r"(?i)\b([\w.-]*(?:password|passwd|secret|token|api[-_]?key|private[-_]?key|credential)s?)"
            r"(\\?[\"']?\s*[=:]\s*\\?[\"']?)(?![\s\"',}\]]|\(hidden\)|true\b|false\b|null\b)[^\s\"',}\]\\]+"
        ),
        rf"\1\2{HIDDEN}",
    ),
)
_OUR_DOMAINS: Final = re.compile(r"(^|\.)(cilium\.io|kubernetes\.io|k8s\.io)/")
_MAPS: Final = "kernel/maps/"
"""Prefixes of files with entries of BPF maps: up to millions of numbers and addresses."""
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def redacted(value: Any) -> Any:
    """Return a document without secrets: by names of fields, by the form of texts, by the use of fields."""
    if isinstance(value, dict):
        return {key: _field(str(key), one) for key, one in value.items()}
    if isinstance(value, list):
        return [redacted(one) for one in value]
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return a text without keys, tokens and passwords."""
    for pattern, instead in _TEXTS:
        text = pattern.sub(instead, text)
    return text


def redacted_file(name: str, content: bytes) -> bytes:
    """Redact a file of a bundle: JSON documents by their fields, others as text; map entries unchanged."""
    if _MAPS in name:
        return content
    try:
        text = content.decode()
    except UnicodeDecodeError:  # a log that starts in the middle of a character
        text = content.decode(errors="replace")
    if name.endswith(".json"):
        try:
            return json.dumps(redacted(json.loads(text)), indent=1).encode() + b"\n"
        except (ValueError, RecursionError):
            return redacted_text(text).encode()
    return redacted_text(text).encode()


def _field(key: str, value: Any) -> Any:
    if key == "annotations" and isinstance(value, dict):
        return {name: _annotation(name, text) for name, text in value.items() if name != _LAST_APPLIED}
    if isinstance(value, list):
        return _listed(key, value)
    return _hidden(value) if _is_secret(key) else redacted(value)


def _listed(key: str, value: list[Any]) -> list[Any]:
    if key == "managedFields":
        return []
    if key == "env":
        return [_variable(one) for one in value]
    if key in {"headers", "headerMatches", "httpHeaders"}:
        return [_header(one) for one in value]
    if key in {"args", "command"}:
        return list(_arguments(value))
    return [_hidden(one) if _is_secret(key) else redacted(one) for one in value]


def _is_secret(key: str) -> bool:
    return bool(_SECRET_KEY.search(key)) and not _HARMLESS_KEY.search(key)


def _hidden(value: Any) -> Any:
    """Replace all texts, except references to a secret."""
    if isinstance(value, dict):
        return {
            key: redacted(one) if _HARMLESS_KEY.search(str(key)) else _hidden(one)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_hidden(one) for one in value]
    return HIDDEN if isinstance(value, str) and value else value


def _arguments(words: list[Any]) -> Iterator[Any]:
    """Redact a command line, in which a flag's value may be the next word."""
    flag = False
    for word in words:
        yield HIDDEN if flag and not str(word).startswith("-") else redacted(word)
        text = str(word)
        flag = text.startswith("-") and "=" not in text and bool(_SECRET_KEY.search(text))


def _annotation(name: str, text: Any) -> Any:
    """Return annotations of Kubernetes and Cilium; hide others."""
    return redacted(text) if _OUR_DOMAINS.search(name) else HIDDEN


def _variable(one: Any) -> Any:
    """Redact a container's environment variable: only its name and source stay."""
    return {**redacted(one), "value": HIDDEN} if isinstance(one, dict) and "value" in one else redacted(one)


def _header(one: Any) -> Any:
    """Redact an HTTP header in a rule: only its name stays."""
    if isinstance(one, str):
        return f"{re.split(r'[ :]', one, maxsplit=1)[0]} {HIDDEN}"
    return {**redacted(one), "value": HIDDEN} if isinstance(one, dict) and "value" in one else redacted(one)
