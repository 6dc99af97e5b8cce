"""Fixtures every tier uses, and signals as programs expect them."""

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a shell's background. What the tests start would inherit it, and not be interruptible either.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    """All async tests run on asyncio, as the agent does."""
    return "asyncio"
