"""Routes of requests by method and path."""

from __future__ import annotations

from typing import Generic, TypeVar
from urllib.parse import unquote

import msgspec

T = TypeVar("T")


class Match(msgspec.Struct, Generic[T], frozen=True):
    """The routes of a path: the handler of the method, or the methods with a handler."""

    handler: T | None
    info: dict[str, str]
    """The decoded parts of the path that the route names."""
    allowed: frozenset[str] = frozenset()
    """Empty if the path has no handler."""


class Routes(Generic[T]):
    """Paths such as ``/v1/endpoint/{id}``, in which ``{id}`` matches one part that is not empty."""

    def __init__(self) -> None:
        self._routes: list[tuple[list[str], dict[str, T]]] = []

    def add(self, method: str, path: str, handler: T) -> None:
        """Add a handler for a method and a path."""
        pattern = path.split("/")
        for existing, methods in self._routes:
            if existing == pattern:
                methods[method] = handler
                return
        self._routes.append((pattern, {method: handler}))

    def match(self, method: str, path: str) -> Match[T]:
        """Return the route of a request; ``path`` as sent. The first route that was added has precedence.

        If a route without named parts matches the path, only its methods exist, as in an OpenAPI document.
        """
        parts = path.split("/")
        allowed: set[str] = set()
        for pattern, methods in self._routes:
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
    """Return the named parts; None if the path does not match."""
    if len(pattern) != len(parts):
        return None
    info = {}
    for expected, raw in zip(pattern, parts, strict=True):
        if expected.startswith("{"):
            if not raw:
                return None
            info[expected[1:-1]] = unquote(raw)
        elif expected != unquote(raw):
            return None
    return info
