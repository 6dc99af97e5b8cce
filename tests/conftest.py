"""Fixtures every tier uses, and signals as programs expect them."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.support import counts
from tests.support.counts import count

__all__ = ["count"]

# A busy machine is no fault of what is tested.
settings.register_profile("hive", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hive")

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


_SECOND = {"crash", "image", "lab"}
"""Folders of the node tier that run beside the others."""


class _Spread(LoadFileScheduling):  # type: ignore[misc]
    """The tests of a file stay together; whole agents run at most two at a time, and one browser."""

    def _split_scope(self, nodeid: str) -> str:
        tests, tier, folder, *_ = nodeid.split("/")
        if tier == "node":
            return f"{tests}/node/{'second' if folder in _SECOND else 'first'}"
        return f"{tests}/{tier}" if tier == "browser" else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Spread:
    """How tests are spread over processes, if they are."""
    return _Spread(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what the tests have counted."""
    reports = [each for kind in terminalreporter.stats.values() for each in kind]
    told = list(counts.lines(each for each in reports if isinstance(each, pytest.TestReport)))
    if told:
        terminalreporter.section("recordings")
        for line in told:
            terminalreporter.line(line)
