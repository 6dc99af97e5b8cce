"""Fixtures every tier uses, and signals as programs expect them."""

import signal
from collections.abc import Iterator

import pytest

from tests.support import counts
from tests.support.counts import count

__all__ = ["count"]

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread over processes, tests of a module stay together, and node tests run one at a time."""
    for item in items:
        tier, _, rest = item.nodeid.removeprefix("tests/").partition("/")
        group = tier if tier in {"node", "browser"} else f"{tier}/{rest.partition('::')[0]}"
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what the tests have counted."""
    reports = [each for kind in terminalreporter.stats.values() for each in kind]
    told = list(counts.lines(each for each in reports if isinstance(each, pytest.TestReport)))
    if told:
        terminalreporter.section("recordings")
        for line in told:
            terminalreporter.line(line)
