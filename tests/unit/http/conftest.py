"""Fixtures of the HTTP server's tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest


@pytest.fixture
async def async_stack() -> AsyncIterator[AsyncExitStack]:
    """Close the entered contexts in reverse order when the test ends."""
    async with AsyncExitStack() as stack:
        yield stack
