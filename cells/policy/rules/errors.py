"""A policy object that is refused, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stage = Literal["schema", "parse"]


class PolicyError(ValueError):
    """The object is refused whole; what it said before stays in force.

    ``stage`` is ``schema`` when the API server's schema refuses it, else ``parse``. ``path`` is the place in
    the object, as ``spec.ingress[0].toPorts[0]``, empty for the whole. ``reason`` is the text without it.
    """

    def __init__(self, reason: str, *, path: str = "", stage: Stage = "parse", prefix: str = "") -> None:
        super().__init__(f"{prefix}{reason}")
        self.reason = reason
        self.path = path
        self.stage: Stage = stage


class UnsupportedError(PolicyError):
    """A rule that Cilium would enforce, and this agent cannot: the rest of the object is in force."""


@contextmanager
def at(path: str) -> Iterator[None]:
    """Put ``path`` before the place that a PolicyError names."""
    try:
        yield
    except PolicyError as error:
        separator = "." if error.path and not error.path.startswith("[") else ""
        error.path = f"{path}{separator}{error.path}"
        raise
