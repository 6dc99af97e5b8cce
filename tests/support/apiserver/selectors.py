"""Label and field selectors, with the messages of those that cannot be parsed.

Gives: label_selector, field_selector, Labels, Fields.
Source: k8s.io/apimachinery/pkg/labels/selector.go, fields/selector.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.support.apiserver.errors import FieldError, bad_request, invalid
from tests.support.apiserver.names import label_value_problem, qualified_name_problem

_TOKEN = re.compile(r"\s*(?:(==|!=|[(),!=<>])|([^\s(),!=<>]+))")
_WORDS = {"in", "notin"}


class Requirement(NamedTuple):
    """One condition on one label."""

    key: str
    operator: str
    values: tuple[str, ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels fulfil it."""
        value = labels.get(self.key)
        if self.operator == "exists":
            return value is not None
        if self.operator == "!":
            return value is None
        if self.operator in {"notin", "!="}:
            return value not in self.values
        if self.operator in {"<", ">"}:
            return _compares(value, self.operator, int(self.values[0]))
        return value is not None and value in self.values


def _compares(value: str | None, operator: str, bound: int) -> bool:
    try:
        number = int(value or "")
    except ValueError:
        return False
    return number > bound if operator == ">" else number < bound


Labels = Callable[[Mapping[str, str]], bool]
Fields = list[tuple[str, bool, str]]
"""Field, whether it must be equal, value."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = [symbol or word for symbol, word in _TOKEN.findall(text)]
        self._at = 0

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self._at += 1
        return token

    def all(self) -> list[Requirement]:
        found: list[Requirement] = []
        token = self.peek()
        while token:
            if token != "!" and _is_symbol(token):
                raise bad_request(f"found '{token}', expected: !, identifier, or 'end of string'")
            found.append(self._requirement())
            token = self.next()
            if not token:
                return found
            if token != ",":
                raise bad_request(f"found '{token}', expected: ',' or 'end of string'")
            token = self.peek()
            if token != "!" and (_is_symbol(token) or not token):
                raise bad_request(f"found '{token}', expected: identifier after ','")
        return found

    def _requirement(self) -> Requirement:
        negated = self.peek() == "!"
        if negated:
            self.next()
        key = self.next()
        if not key or _is_symbol(key):
            raise _unparsed(f"found '{key}', expected: identifier")
        if problem := qualified_name_problem(key):
            raise _unparsed(invalid("<nil>", key, problem).text)
        if negated:
            return Requirement(key, "!", ())
        if self.peek() in {"", ","}:
            return Requirement(key, "exists", ())
        return self._with_values(key, self.next())

    def _with_values(self, key: str, operator: str) -> Requirement:
        if operator in _WORDS:
            return self._checked(Requirement(key, operator, self._set()))
        if operator in {"=", "==", "!=", "<", ">"}:
            value = ""
            if self.peek() not in {"", ","}:
                value = self.next()
            return self._checked(Requirement(key, operator, (value,)))
        raise _unparsed(f"found '{operator}', expected: in, notin, =, ==, !=, gt, lt")

    def _set(self) -> tuple[str, ...]:
        if (token := self.next()) != "(":
            raise _unparsed(f"found '{token}' expected: '('")
        values: list[str] = []
        while True:
            token = self.next()
            if token == ")":
                return tuple(values)
            if token == ",":
                continue
            if not token:
                raise _unparsed("found '', expected: ',' or ')'")
            values.append(token)
            if self.peek() not in {",", ")"}:
                raise _unparsed(f"found '{self.peek()}', expected: ',' or ')'")

    def _checked(self, requirement: Requirement) -> Requirement:
        for number, value in enumerate(requirement.values):
            if requirement.operator in {"<", ">"}:
                if not re.fullmatch(r"[-+]?\d+", value):
                    why = "for 'Gt', 'Lt' operators, the value must be an integer"
                    raise _unparsed(invalid(f"values[{number}]", value, why).text)
            elif problem := label_value_problem(value):
                raise _unparsed(invalid(f"values[{number}][{requirement.key}]", value, problem).text)
        return requirement


def _is_symbol(token: str) -> bool:
    return token in {"==", "!=", "(", ")", ",", "!", "=", "<", ">"}


def _unparsed(why: str) -> Exception:
    return bad_request(f"unable to parse requirement: {why}")


def label_selector(text: str) -> Labels | None:
    """Whether labels are selected; None selects everything. Raises StatusError 400."""
    requirements = _Parser(text).all()
    if not requirements:
        return None
    return lambda labels: all(one.matches(labels) for one in requirements)


def field_selector(text: str) -> Fields:
    """The conditions of a field selector. Raises StatusError 400."""
    found: Fields = []
    for term in re.split(r"(?<!\\),", text):
        if not term:
            continue
        match = re.search(r"==|!=|=", term)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{term}'")
        name, value = term[: match.start()], term[match.end() :]
        if bad := re.search(r"(?<!\\)[=,]", value):
            raise bad_request(f"invalid field selector: unescaped character in value: {ord(bad[0])}")
        value = re.sub(r"\\([\\=,])", r"\1", value)
        if name or value:
            found.append((name, match[0] != "!=", value))
    return found


def selector_errors(selector: object, at: str) -> list[FieldError]:
    """What is wrong with a LabelSelector object."""
    if not isinstance(selector, dict):
        return []
    found = []
    for key, value in (selector.get("matchLabels") or {}).items():
        if problem := qualified_name_problem(key):
            found.append(invalid(f"{at}.matchLabels", key, problem))
        if problem := label_value_problem(value):
            found.append(invalid(f"{at}.matchLabels", value, problem))
    for number, one in enumerate(selector.get("matchExpressions") or ()):
        found += _expression_errors(one, f"{at}.matchExpressions[{number}]")
    return found


def _expression_errors(one: Mapping[str, object], at: str) -> list[FieldError]:
    found = []
    operator, values = one.get("operator", ""), one.get("values") or []
    if operator in {"In", "NotIn"}:
        if not values:
            why = "must be specified when `operator` is 'In' or 'NotIn'"
            found.append(FieldError("required", f"{at}.values", why))
    elif operator in {"Exists", "DoesNotExist"}:
        if values:
            why = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
            found.append(FieldError("forbidden", f"{at}.values", why))
    else:
        found.append(invalid(f"{at}.operator", operator, "not a valid selector operator"))
    key = str(one.get("key", ""))
    if problem := qualified_name_problem(key):
        found.append(invalid(f"{at}.key", key, problem))
    return found
