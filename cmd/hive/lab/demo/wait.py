"""Wait for a condition in a demo."""

import time
from typing import Any

WITHIN = 60.0


def eventually(condition: Any) -> Any:
    """Call a function until its result is true, for at most WITHIN seconds; return the last result."""
    deadline = time.monotonic() + WITHIN
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
