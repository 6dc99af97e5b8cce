"""Waiting for what is to become true."""

import time
from typing import Any

WITHIN = 60.0


def eventually(condition: Any) -> Any:
    """What it gives, once that is true; the last it gave after WITHIN seconds."""
    deadline = time.monotonic() + WITHIN
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
