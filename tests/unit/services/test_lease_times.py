"""Times of the leases of L2 announcements."""

from __future__ import annotations

import pytest

from cells.config.shared import AnnouncementSettings
from lifecycle import Duration


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (("15s", "5s", "2s", "1s"), (15, 5, 2, 1)),
        (("500ms", "5s", "2s", "1s"), (1, 0.5, 0.25, 0.5)),
        (("3s", "5s", "1s", "5s"), (3, 1.5, 1, 1)),
        (("10s", "2s", "2s", "9s"), (10, 2, 1, 9)),
        (("10s", "0", "0", "0"), (10, 1, 0.2, 1)),
        (("10s", "-1s", "-1s", "-1s"), (10, 1, 0.2, 1)),
    ],
)
def test_times_that_an_election_cannot_have_are_replaced_as_in_cilium(
    given: tuple[str, ...], used: tuple[float, ...]
) -> None:
    settings = AnnouncementSettings(True, *map(Duration.parse, given))
    assert list(settings.faults()) == []
    assert settings.lease_times == used


def test_times_do_not_matter_without_announcements() -> None:
    settings = AnnouncementSettings(False, Duration(0), Duration(0), Duration(0), Duration(0))
    assert list(settings.faults()) == []
