"""Waits for the first of several things.

Needs: nothing.   Gives: either().
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio


async def either(*waits: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Return when the first of them does; the others are cancelled."""
    async with anyio.create_task_group() as group:

        async def one(wait: Callable[[], Coroutine[Any, Any, None]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(one, wait)
