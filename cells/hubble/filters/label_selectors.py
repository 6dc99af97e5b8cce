"""Kubernetes label selectors in text form, applied to Cilium's labels with sources.

``app=web,env in (prod,dev),!reserved:host``: a key without ``source:`` matches labels of any source.

Source: k8s.io/apimachinery, pkg/labels (grammar); Cilium 1.17, pkg/hubble/filters/labels.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

ANY: Final = "any"

Labels = Mapping[str, str]
"""Label values by ``source:key`` and by ``any:key``."""
Requirement = Callable[[Labels], bool]

_TOKEN = re.compile(r"\s*(==|!=|[=!<>(),]|[^\s=!<>(),]+)")
_KEY = re.compile(
    r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_SYMBOLS: Final = frozenset(("==", "!=", "=", "!", "<", ">", "(", ")", ",", ""))


_KEY_FAULT: Final = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an"
    " alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is"
    " '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_VALUE_FAULT: Final = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must"
    " start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used"
    " for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


class LabelSelectorError(ValueError):
    """Raised for a text that is not a label selector."""


def index_labels(labels: Sequence[str]) -> Labels:
    """Index labels by ``source:key`` and ``any:key``; those without a source by ``any:key`` only."""
    found: dict[str, str] = {}
    for label in labels:
        name, _, value = label.partition("=")
        source, colon, key = name.partition(":")
        found[f"{source}:{key}" if colon else f"unspec:{name}"] = value
        found.setdefault(f"{ANY}:{key if colon else name}", value)
    return found


def parse_selector(text: str) -> list[Requirement]:
    """Parse a selector to requirements, all of which must match; none for an empty text.

    Raises LabelSelectorError.
    """
    return _Parser(text).requirements()


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(text)
        if _TOKEN.sub("", text).strip():
            raise LabelSelectorError(f"unable to parse {text!r}")
        self._at = 0

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def requirements(self) -> list[Requirement]:
        found: list[Requirement] = []
        while self._peek():
            found.append(self._requirement())
            symbol = self._next()
            if symbol not in {",", ""}:
                raise LabelSelectorError(f"found '{symbol}', expected: ',' or 'end of string'")
            if symbol == "," and (self._peek() in _SYMBOLS - {"!"}):
                raise LabelSelectorError(f"found '{self._peek()}', expected: identifier after ','")
        return found

    def _requirement(self) -> Requirement:
        negated = self._peek() == "!" and self._next() == "!"
        key = _full_key(self._next())
        if negated or self._peek() in {"", ","}:
            return lambda labels: (key in labels) != negated
        operator = self._next()
        if operator in {"in", "notin"}:
            values = self._set(key)
            return lambda labels: (labels.get(key) in values) == (operator == "in")
        if operator not in {"=", "==", "!=", "<", ">"}:
            raise LabelSelectorError(
                f"unable to parse requirement: found '{operator}', expected: in, notin, =, ==, !=, gt, lt"
            )
        value = "" if self._peek() in {"", ","} else self._next()
        if operator in {"<", ">"}:
            return _comparison(key, operator, value)
        _check_value(key, value)
        return lambda labels: (labels.get(key) == value) != (operator == "!=")

    def _set(self, key: str) -> frozenset[str]:
        if (symbol := self._next()) != "(":
            raise LabelSelectorError(f"unable to parse requirement: found '{symbol}', expected: '('")
        values, value = set(), ""
        while (symbol := self._next()) != ")":
            if symbol == ",":
                values.add(value)
                value = ""
            elif not symbol or symbol in _SYMBOLS or value:
                raise LabelSelectorError(
                    f"unable to parse requirement: found '{symbol}', expected: ',' or ')'"
                )
            else:
                value = symbol
                _check_value(key, value, len(values))
        return frozenset((*values, value))


def _full_key(token: str) -> str:
    source, colon, name = token.partition(":")
    if not colon:
        source, name = ANY, "" if token in _SYMBOLS else token
    key = f"{source}.{name}"
    if not name or not _KEY.fullmatch(key):
        raise LabelSelectorError(f'unable to parse requirement: <nil>: Invalid value: "{key}": {_KEY_FAULT}')
    return f"{source}:{name}"


def _check_value(key: str, value: str, place: int = 0) -> None:
    if not _VALUE.fullmatch(value):
        where = f"values[{place}][{key.replace(':', '.', 1)}]"
        fault = f'{where}: Invalid value: "{value}": {_VALUE_FAULT}'
        raise LabelSelectorError(f"unable to parse requirement: {fault}")


def _comparison(key: str, operator: str, text: str) -> Requirement:
    try:
        bound = int(text)
    except ValueError:
        raise LabelSelectorError(f"unable to parse requirement: {text!r} is not a number") from None

    def holds(labels: Labels) -> bool:
        try:
            value = int(labels[key])
        except (KeyError, ValueError):
            return False
        return value > bound if operator == ">" else value < bound

    return holds
