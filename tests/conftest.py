"""Fixtures every tier uses, and signals as programs expect them."""

import signal
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a shell's background. What the tests start would inherit it, and not be interruptible either.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """An agent that a test runs to its end here leaves signals as a process has them that ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def anyio_backend() -> str:
    """All async tests run on asyncio, as the agent does."""
    return "asyncio"
