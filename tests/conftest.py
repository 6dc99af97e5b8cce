"""Fixtures every tier uses."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """All async tests run on asyncio, as the agent does."""
    return "asyncio"
