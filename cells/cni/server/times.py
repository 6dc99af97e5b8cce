"""How long plugins waited for the answers to their calls.

For:    CniServer counts, its metrics tell. Needs: nothing. Gives: CallTimes.
"""

from __future__ import annotations

from cells.observe.metrics import Family, Histogram, histogram

_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""In seconds: an ADD is a millisecond of work."""


class CallTimes:
    """Seconds from the arrival of a call to its answer, by command and outcome."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str], Histogram] = {}

    def count(self, command: str, outcome: str, seconds: float) -> None:
        """Count a call; ``outcome`` is success or fail."""
        if (spread := self.took.get((command, outcome))) is None:
            spread = self.took[command, outcome] = Histogram(_BOUNDS)
        spread.observe(seconds)

    def families(self) -> list[Family]:
        """As a metric; the name is ours, Cilium has none for it."""
        text = "Time from a call of the CNI plugin to its answer, waiting for its turn included"
        return [histogram("hive_cni_call_seconds", text, self.took, "command outcome")]
