"""Too many requests: priority and fairness by its objects, and plain in-flight limits.

Gives: Flow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.apiserver.auth import User
from tests.support.apiserver.errors import Obj, Resource, StatusError
from tests.support.apiserver.store import Store
from tests.support.apiserver.wire import Request

FLOWS = "flowcontrol.apiserver.k8s.io"
MESSAGE = b"Too many requests, please try again later.\n"


def too_many() -> StatusError:
    """429 without a Status."""
    headers = {"Retry-After": "1", "X-Content-Type-Options": "nosniff"}
    return StatusError(429, "TooManyRequests", "too many requests", text=MESSAGE, headers=headers)


class Flow:
    """Holds requests back, or refuses them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.busy: dict[str, int] = {}
        """Priority level -> seats that others take."""
        self.max_in_flight: int | None = None
        self.in_flight = 0

    @asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[None]:
        """Count a request while it is answered."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def wait(self, request: Request, user: User) -> None:
        """Until the request may go on. Raises StatusError 429."""
        if "system:masters" in user.groups:
            return
        level = self._level(user)
        if level is None:
            return
        name, limited = level["metadata"]["name"], (level.get("spec") or {}).get("limited") or {}
        if not self.busy.get(name):
            return
        response = limited.get("limitResponse") or {}
        if response.get("type") != "Queue":
            raise too_many()
        await asyncio.sleep(1.0)
        if self.busy.get(name):
            raise too_many()

    def _level(self, user: User) -> Obj | None:
        schemas = self._store.of(Resource(FLOWS, "flowschemas")).objects.values()
        ordered = sorted(schemas, key=lambda one: one["spec"].get("matchingPrecedence", 1000))
        for schema in ordered:
            if any(_matches(rule, user) for rule in schema["spec"].get("rules") or ()):
                name = schema["spec"]["priorityLevelConfiguration"]["name"]
                return self._store.get(Resource(FLOWS, "prioritylevelconfigurations"), ("", name))
        return None


def _matches(rule: Obj, user: User) -> bool:
    for subject in rule.get("subjects") or ():
        if subject["kind"] == "User" and subject["user"]["name"] == user.name:
            return True
        if subject["kind"] == "Group" and subject["group"]["name"] in user.groups:
            return True
    return False
