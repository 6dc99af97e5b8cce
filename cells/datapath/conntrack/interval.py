"""How long to wait between two passes over the conntrack maps.

For:    ConntrackGC. Needs: nothing. Gives: next_interval() and its bounds.
Source: Cilium 1.17, conntrack garbage collection (the interval follows from the share of entries removed).
"""

import math
from typing import Final

START: Final = 300.0
SHORTEST: Final = 10.0
LONGEST: Final = 12 * 3600.0

MANY: Final = 0.25
"""A larger share removed makes the interval shorter."""
FEW: Final = 0.05
"""A smaller share, though not none, makes it longer."""
MOST: Final = 0.9
"""Larger shares count as this one."""
GROWTH: Final = 1.5


def next_interval(expected: float, removed: float, actual: float | None = None) -> float:
    """Seconds to wait after a pass that removed this share (0 to 1) of the fullest map's capacity.

    ``expected`` is the interval that was to pass before it, ``actual`` the one that did, None for a first
    pass: one that came early has had less time to find something, so its share counts for more.
    A share of 0 says that there is no traffic, and changes nothing.
    """
    share = removed
    if actual is not None and 0 < actual < expected:
        share *= expected / actual
    if share > MANY:
        return max(whole(expected * (1 - min(share, MOST))), SHORTEST)
    if 0 < share < FEW:
        return min(whole(expected * GROWTH), LONGEST)
    return expected


def whole(seconds: float) -> float:
    """Rounded to a second, halves up."""
    return float(math.floor(seconds + 0.5))
