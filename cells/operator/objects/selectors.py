"""Label selectors as text, as settings and annotations have them.

Needs: nothing.   Gives: selector_of().
Source: k8s.io/apimachinery/pkg/labels, Parse: ``a=b,c!=d,e in (f,g),h notin (i),j,!k``.
"""

from __future__ import annotations

import re
from typing import Final

from cells.kubernetes import Requirement, Selector

NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
KEY: Final = rf"(?:[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/)?{NAME}"
REQUIREMENT: Final = re.compile(
    rf"""\s*(?:
        !\s*(?P<absent>{KEY})
      | (?P<key>{KEY})\s*(?:
            (?P<equality>==|=|!=)\s*(?P<value>(?:{NAME})?)
          | \s(?P<set>in|notin)\s*\((?P<values>[^()]*)\)
        )?
    )\s*(?:,|$)""",
    re.VERBOSE,
)
VALUE: Final = re.compile(rf"(?:{NAME})?")
LONGEST: Final = 63
"""Letters of a name or a value."""


def selector_of(text: str) -> Selector:
    """The selector that a text says; an empty one selects everything. Raises ValueError, without the text."""
    found: list[Requirement] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = REQUIREMENT.match(text, at)
        if match is None or (text[match.end() - 1] == "," and match.end() == len(text)):
            raise ValueError("expected labels such as key=value,other in (a,b),!third")
        found.append(_requirement(match))
        at = match.end()
    return Selector(match_expressions=tuple(found))


def _requirement(match: re.Match[str]) -> Requirement:
    if (absent := match["absent"]) is not None:
        return _checked(Requirement(absent, "DoesNotExist", ()))
    key: str = match["key"]
    if match["equality"] is not None:
        operator = "NotIn" if match["equality"] == "!=" else "In"
        return _checked(Requirement(key, operator, (match["value"],)))
    if match["set"] is not None:
        values = tuple(one.strip() for one in match["values"].split(","))
        return _checked(Requirement(key, "In" if match["set"] == "in" else "NotIn", values))
    return _checked(Requirement(key, "Exists", ()))


def _checked(requirement: Requirement) -> Requirement:
    name = requirement.key.rpartition("/")[2]
    for one in (name, *(requirement.values or ())):
        if len(one) > LONGEST or not VALUE.fullmatch(one):
            raise ValueError(
                f"{one!r}: expected at most {LONGEST} letters, digits, '-', '_' and '.',"
                " with a letter or digit at either end"
            )
    return requirement
