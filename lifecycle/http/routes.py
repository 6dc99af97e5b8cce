"""Which handler a method and a path lead to."""

from __future__ import annotations

from typing import Generic, TypeVar
from urllib.parse import unquote

import msgspec

T = TypeVar("T")


class Match(msgspec.Struct, Generic[T], frozen=True):
    """What is known at a path: what the method leads to, or the methods that lead somewhere."""

    found: T | None
    info: dict[str, str]
    """The decoded parts of the path that the route names."""
    allowed: frozenset[str] = frozenset()
    """Empty when nothing is at the path."""


class Routes(Generic[T]):
    """Paths such as ``/v1/endpoint/{id}``, where ``{id}`` stands for one part that is not empty."""

    def __init__(self) -> None:
        self._known: list[tuple[list[str], dict[str, T]]] = []

    def add(self, method: str, path: str, handler: T) -> None:
        """Let the method at the path lead to ``handler``."""
        pattern = path.split("/")
        for known, methods in self._known:
            if known == pattern:
                methods[method] = handler
                return
        self._known.append((pattern, {method: handler}))

    def match(self, method: str, path: str) -> Match[T]:
        """Where a request leads; ``path`` as it was sent. The first route that was added wins.

        At a path that a route has without named parts, only its methods are there, as in an OpenAPI document.
        """
        parts = path.split("/")
        allowed: set[str] = set()
        for pattern, methods in self._known:
            info = _parts(pattern, parts)
            if info is None:
                continue
            if method in methods:
                return Match(methods[method], info)
            allowed |= methods.keys()
            if not info:
                break
        return Match(None, {}, frozenset(allowed))


def _parts(pattern: list[str], parts: list[str]) -> dict[str, str] | None:
    """The named parts, None when the path is another."""
    if len(pattern) != len(parts):
        return None
    info = {}
    for wanted, raw in zip(pattern, parts, strict=True):
        if wanted.startswith("{"):
            if not raw:
                return None
            info[wanted[1:-1]] = unquote(raw)
        elif wanted != unquote(raw):
            return None
    return info
