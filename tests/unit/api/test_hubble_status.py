"""What the API reports of Hubble's ring."""

from __future__ import annotations

import pytest

from cells.api.operations.status import hubble_status


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (60, "1m0s"), (3600, "1h0m0s"), (90061, "25h1m1s")]
)
def test_the_uptime_is_written_as_go_does(seconds: int, text: str) -> None:
    observer = hubble_status(1, 7, 9, seconds * 1_000_000_000 + 999).observer
    assert observer is not None
    assert observer.uptime == text
