"""A line of a script: what is expected of the command, its name, its arguments.

Source: cilium/hive's script language. Words are split at blanks; single quotes keep blanks and variables as
        they are, ``''`` in them is a quote; ``$name`` and ``${name}`` are variables; ``#`` begins a comment.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

__all__ = ["Expected", "Line", "expand", "read", "unfinished"]

Expected = Literal["success", "failure", "either"]

Piece = tuple[str, bool]
"""A part of a word, and whether variables are expanded in it."""

_PREFIX = re.compile(r"(?P<marks>[!?*]+)(?:\s+|$)")
_MARKS: dict[str, tuple[Expected, bool]] = {
    "!": ("failure", False),
    "?": ("either", False),
    "*": ("success", True),
    "!*": ("failure", True),
    "*!": ("failure", True),
}
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)\}|(?P<plain>[A-Za-z_]\w*))")


class Line(msgspec.Struct, frozen=True):
    """One command as written."""

    number: int
    text: str
    expected: Expected
    retried: bool
    """Whether its section is repeated until the result is as expected."""
    words: tuple[tuple[Piece, ...], ...]
    """The name of the command, then its arguments."""


def read(text: str, number: int = 1) -> Line | None:
    """Return the command in a line, None if that is empty or a comment.

    Raises ValueError for a syntax error.
    """
    rest = text.strip()
    expected: Expected = "success"
    retried = False
    if (prefix := _PREFIX.match(rest)) is not None:
        if (meaning := _MARKS.get(prefix["marks"])) is None:
            raise ValueError(
                f"{prefix['marks']}: expected ! (fails), ? (may fail), * (until it succeeds) or !*"
            )
        expected, retried = meaning
        rest = rest[prefix.end() :]
    words, quoted = _split(rest)
    if quoted:
        raise ValueError("a quote is not closed: expected another '")
    if not words:
        if prefix is not None:
            raise ValueError(f"{prefix['marks']}: expected a command after it")
        return None
    return Line(number, text.strip(), expected, retried, tuple(map(tuple, words)))


def expand(word: tuple[Piece, ...], variables: Mapping[str, str]) -> str:
    """Expand the variables in a word; an unset variable is empty."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["braced"] or match["plain"], "")

    return "".join(_VARIABLE.sub(value, text) if expands else text for text, expands in word)


def unfinished(text: str) -> tuple[list[str], str]:
    """Return the words of an incomplete line, and the beginning of its last word; for completion."""
    rest = text.lstrip()
    if (prefix := _PREFIX.match(rest)) is not None:
        rest = rest[prefix.end() :]
    words = ["".join(part for part, _ in word) for word in _split(rest)[0]]
    if not words or (text[-1:].isspace() and not _split(rest)[1]):
        return words, ""
    return words[:-1], words[-1]


def _split(text: str) -> tuple[list[list[Piece]], bool]:
    """Return the words, and whether a quote is open at the end."""
    words: list[list[Piece]] = []
    word: list[Piece] | None = None
    position, quoted = 0, False
    while position < len(text):
        letter = text[position]
        if quoted:
            end = text.find("'", position)
            piece = text[position:] if end < 0 else text[position:end]
            assert word is not None  # noqa: S101  # an opening quote begins one
            word.append((piece, False))
            position = len(text) if end < 0 else end + 1
            quoted = end < 0
            if not quoted and text[position : position + 1] == "'":  # '' is a quote
                word.append(("'", False))
                position, quoted = position + 1, True
            continue
        if letter.isspace():
            word = None
        elif letter == "#" and word is None:
            break
        else:
            if word is None:
                word = []
                words.append(word)
            if letter == "'":
                quoted = True
            else:
                end = position + 1
                while end < len(text) and not text[end].isspace() and text[end] != "'":
                    end += 1
                word.append((text[position:end], True))
                position = end
                continue
        position += 1
    return words, quoted
