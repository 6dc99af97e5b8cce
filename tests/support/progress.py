"""Shows the progress of a test run: a line every half minute, and a summary of each tier at the end."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from tests.support.order import tier_of

EVERY = 30.0
"""Seconds between lines."""


class Progress:
    """Counts tests by tier, and records the longest running one."""

    def __init__(self, terminal: pytest.TerminalReporter, *, threaded: bool) -> None:
        """With ``threaded`` a thread prints lines while a test runs: for a process without tests."""
        self._terminal = terminal
        self._threaded = threaded
        self._over = threading.Event()
        self._of: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._slowest: dict[str, tuple[float, str]] = {}
        self._running: dict[str, float] = {}
        self._last = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests, if this process runs them."""
        self._count(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the tests: all processes have collected the same."""
        if not self._of:
            self._count(ids)
            if self._threaded:
                threading.Thread(target=self._report, name="progress", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the start of a test."""
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase of a test. A failure is named at once, and shown at the end."""
        if report.failed:
            self._failed[tier_of(report.nodeid)] += 1
            self._terminal.write_line(f"failed: {report.nodeid} ({report.when})")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record the end of a test."""
        took = time.monotonic() - self._running.pop(nodeid, time.monotonic())
        tier = tier_of(nodeid)
        self._done[tier] += 1
        self._seconds[tier] += took
        self._slowest[tier] = max(self._slowest.get(tier, (0.0, "")), (took, nodeid))
        if not self._threaded and time.monotonic() - self._last >= EVERY:
            self._line()

    def pytest_sessionfinish(self) -> None:
        """Print no more lines."""
        self._over.set()

    def pytest_terminal_summary(self) -> None:
        """Print a line for each tier: number of tests, duration, the slowest ones."""
        if sum(self._seconds.values()) < EVERY:
            return
        self._terminal.section("tiers")
        for tier, done in self._done.items():
            took, slowest = self._slowest[tier]
            failed = f", {self._failed[tier]} failed" if self._failed[tier] else ""
            self._terminal.line(
                f"{tier}: {done} tests in {self._seconds[tier]:.0f} s of processes{failed};"
                f" slowest {took:.1f} s: {slowest}"
            )

    def _count(self, ids: Iterable[str]) -> None:
        self._of.update(map(tier_of, ids))

    def _report(self) -> None:
        while not self._over.wait(EVERY):
            self._line()

    def _line(self) -> None:
        self._last = now = time.monotonic()
        tiers = ", ".join(
            f"{tier} {self._done[tier]}/{number}" + (f" ({failed} failed)" if failed else "")
            for tier, number in self._of.items()
            for failed in (self._failed[tier],)
        )
        longest = min(((began, nodeid) for nodeid, began in self._running.copy().items()), default=None)
        running = f"; running longest: {longest[1]}, {now - longest[0]:.0f} s" if longest else ""
        self._terminal.write_line(f"[{tiers}{running}]")
