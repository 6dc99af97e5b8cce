"""Faults that a test injects into exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.apiserver.wire import Request

Matches = Callable[[Request], bool]
AGENT, OPERATOR = "cilium-agent", "cilium-operator"
"""What these clients call themselves."""


@dataclass
class Fault:
    """What happens instead of, or to, the answer of a request that matches."""

    matches: Matches = lambda _: True
    times: int = 1
    """How often; negative for ever."""
    status: int = 0
    """Answer with this status."""
    body: Any = None
    """With this JSON; text, or bytes as they are."""
    headers: dict[str, str] | None = None
    delay: float = 0.0
    """Seconds to wait first."""
    close: bool = False
    """Close the connection without an answer."""
    cut_after: int | None = None
    """Of a watch: close the connection in the middle of the event with this number, counted from 0."""
    insert: bytes | None = None
    """Of a watch: these bytes before the first event, in a chunk of their own."""
    end_after: int | None = None
    """Of a watch: the last chunk after so many events."""
    stall: bool = False
    """Never answer; of a watch: never send anything."""
    hits: int = 0


class Faults:
    """The faults in force, the first that matches counts."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> Fault:
        """Put a fault in force."""
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """All is well again."""
        self._faults.clear()

    def of(self, request: Request) -> Fault | None:
        """The fault for a request, counted."""
        for fault in self._faults:
            if fault.times != 0 and fault.matches(request):
                fault.times -= 1
                fault.hits += 1
                return fault
        return None


def of_client(name: str) -> Matches:
    """All requests of the client that names itself so in User-Agent, and its version."""
    return lambda request: request.header("User-Agent").startswith(name)


def on(path: str, *, watch: bool | None = None, method: str = "") -> Matches:
    """Requests for a path, or below it; only watches, or none."""

    def matches(request: Request) -> bool:
        if not request.path.startswith(path) or (method and request.method != method):
            return False
        watching = request.query.get("watch", "0") not in {"0", "false"}
        return watch is None or watching is watch

    return matches
