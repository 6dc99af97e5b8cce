"""The number of hypothesis examples: a quarter in every run, all with ``EXAMPLES=all``, as in ``make soak``.

Each run draws other examples, except tests that are derandomized.
"""

import os

SHARE = 1 if os.environ.get("EXAMPLES") == "all" else 4


def scaled(count: int) -> int:
    """Scale a number of examples, to at least ten."""
    return max(min(count, 10), count // SHARE)
