"""How builds of endpoints went, and how long they took.

For:   Endpoints counts, its metrics tell.   Needs: nothing.   Gives: Builds.
"""

import time

from cells.observe.metrics import Histogram


class Builds:
    """Every build there was, those at creation too."""

    def __init__(self) -> None:
        self.took = {"success": Histogram(), "failure": Histogram()}
        """Seconds."""

    @property
    def succeeded(self) -> int:
        """How many worked."""
        return self.took["success"].count

    @property
    def failed(self) -> int:
        """How many did not."""
        return self.took["failure"].count

    def count(self, began: float, *, worked: bool) -> None:
        """Count one that began at this perf_counter() and is over."""
        self.took["success" if worked else "failure"].observe(time.perf_counter() - began)
