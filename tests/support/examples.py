"""How many examples hypothesis draws: a quarter in every run, all with ``EXAMPLES=all``, as in ``make soak``.

Runs draw others each time, and so add up, but for tests that are derandomized.
"""

import os

SHARE = 1 if os.environ.get("EXAMPLES") == "all" else 4


def scaled(count: int) -> int:
    """The examples to draw of so many, at least ten."""
    return max(min(count, 10), count // SHARE)
