"""Constraints of msgspec.Meta on values beyond their types: bounds, lengths, a pattern.

``Annotated[int, msgspec.Meta(ge=1, le=65535)]`` is enforced for values of all sources, and shown in help, the
reference and the JSON schema.
"""

import re
from collections.abc import Iterator, Sized
from typing import Any

import msgspec

from lifecycle.settings import values
from lifecycle.settings.durations import Duration
from lifecycle.settings.quantities import Quantity
from lifecycle.settings.secrets import Secret

__all__ = ["Limits"]

_NUMBERS = {int, float, Duration, Quantity}
_TEXTS = {str, Secret}

_BOUNDS = (
    ("ge", "at least {}", "minimum"),
    ("gt", "more than {}", "exclusiveMinimum"),
    ("le", "at most {}", "maximum"),
    ("lt", "less than {}", "exclusiveMaximum"),
    ("multiple_of", "a multiple of {}", "multipleOf"),
)
"""Of numbers: the field of Meta, the expectation in words, and the keyword of JSON Schema."""


class Limits(msgspec.Struct, frozen=True):
    """The constraints of one option."""

    metas: tuple[msgspec.Meta, ...] = ()

    def check(self, value: object) -> None:
        """Raise ValueError("expected ...") for a value that violates them; None is not checked."""
        if value is None:
            return
        text = value.reveal() if isinstance(value, Secret) else value
        for meta in self.metas:
            if not all(_holds(meta, name, text) for name, _, _ in _BOUNDS) or not _fits(meta, text):
                raise ValueError(f"expected {self.expects(type(value))}")

    def expects(self, kind: object) -> str:
        """Return all constraints, in words that follow 'expected'; empty without any."""
        return ", ".join(words for meta in self.metas for words in _words(meta, kind))

    def schema(self, kind: object) -> dict[str, Any]:
        """In JSON Schema, without bounds of durations and quantities, which are texts there."""
        result: dict[str, Any] = {}
        base, _ = values.bare(kind)
        for meta in self.metas:
            if base in {int, float}:
                bounds = {word: getattr(meta, name) for name, _, word in _BOUNDS}
                result |= {word: bound for word, bound in bounds.items() if bound is not None}
            suffix = "Items" if values.is_list(kind) else "Properties" if values.is_map(kind) else "Length"
            lengths = {
                f"min{suffix}": meta.min_length,
                f"max{suffix}": meta.max_length,
                "pattern": meta.pattern,
            }
            result |= {word: limit for word, limit in lengths.items() if limit is not None}
            result |= {"title": meta.title} if meta.title else {}
            result |= {"examples": meta.examples} if meta.examples else {}
            result |= meta.extra_json_schema or {}
        return result

    def inapplicable(self, kind: object) -> Iterator[str]:
        """Yield the constraints that do not apply to values of the type."""
        base, _ = values.bare(kind)
        sized = values.is_list(kind) or values.is_map(kind)
        for meta in self.metas:
            bounds = [name for name, _, _ in _BOUNDS if getattr(meta, name) is not None]
            lengths = [name for name in ("min_length", "max_length") if getattr(meta, name) is not None]
            if base not in _NUMBERS:
                yield from bounds
            if base not in _TEXTS and not sized:
                yield from lengths
            if meta.pattern is not None and base not in _TEXTS:
                yield "pattern"
            if meta.tz is not None:
                yield "tz"


def _holds(meta: msgspec.Meta, name: str, value: Any) -> bool:
    if (bound := getattr(meta, name)) is None:
        return True
    match name:
        case "ge":
            return bool(value >= bound)
        case "gt":
            return bool(value > bound)
        case "le":
            return bool(value <= bound)
        case "lt":
            return bool(value < bound)
        case _:
            return bool(value % bound == 0)


def _fits(meta: msgspec.Meta, value: object) -> bool:
    if isinstance(value, Sized):
        shortest = 0 if meta.min_length is None else meta.min_length
        if len(value) < shortest or (meta.max_length is not None and len(value) > meta.max_length):
            return False
    return meta.pattern is None or re.search(meta.pattern, str(value)) is not None


def _words(meta: msgspec.Meta, kind: object) -> Iterator[str]:
    for name, words, _ in _BOUNDS:
        if (bound := getattr(meta, name)) is not None:
            shown = kind(bound) if kind in {Duration, Quantity} and callable(kind) else bound
            yield words.format(shown)
    unit = "character" if kind in _TEXTS else "value"
    for words, length in (("at least", meta.min_length), ("at most", meta.max_length)):
        if length is not None:
            yield f"{words} {length} {unit}{'' if length == 1 else 's'}"
    if meta.pattern is not None:
        yield f"a text that matches {meta.pattern}"
