"""Counts replayed recordings, and the reasons not to replay one; shown after a test run.

The counts travel with the tests' reports, so they also arrive from worker processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, cast

import pytest

PROPERTY = "counts"


class Count(Protocol):
    """Counts outcomes under a title; the run's summary has a line for each, the most frequent first."""

    def __call__(self, title: str, outcomes: Mapping[str, int]) -> None: ...


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Return the counter of this test."""

    def add(title: str, outcomes: Mapping[str, int]) -> None:
        record_property(PROPERTY, [title, dict(outcomes)])

    return add


def lines(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Return the sums of all reports as lines. A test's last report includes what its fixtures counted."""
    titles: dict[str, Counter[str]] = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "teardown":
                title, outcomes = cast("tuple[str, dict[str, int]]", value)
                titles.setdefault(title, Counter()).update(outcomes)
    for title, outcomes in sorted(titles.items()):
        yield title
        for outcome, number in outcomes.most_common():
            yield f"  {number:5} {outcome}"


def not_replayed(reasons: Iterable[str]) -> dict[str, int]:
    """Return how often each reason not to replay a recording was given."""
    return {f"not: {reason}": number for reason, number in Counter(reasons).items()}
