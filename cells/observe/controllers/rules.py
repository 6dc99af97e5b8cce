"""When a controller runs again, and what is known of one: values.

For:   Controllers and their views.   Needs: nothing.   Gives: Rules, ControllerStatus.
Source: Cilium 1.17, controllers: retries wait linearly longer.
"""

import math

import msgspec


class Rules(msgspec.Struct, frozen=True):
    """When a controller runs again; all in seconds."""

    interval: float = 0.0
    """After a success; 0 waits until it is updated or triggered."""
    retry_base: float = 1.0
    """After n failures in a row it waits n times this."""
    retry_maximum: float = 0.0
    """The longest wait after a failure; 0 sets no bound."""
    retries: bool = True
    """Whether failures have waits of their own; without, the interval counts after them too."""

    def pause(self, failures: int) -> float:
        """The wait after so many failures in a row, 0 for a success; infinite until triggered."""
        if failures and self.retries:
            return min(failures * self.retry_base, self.retry_maximum or math.inf)
        return self.interval or math.inf


class ControllerStatus(msgspec.Struct, frozen=True):
    """A controller as it is now; times are Unix seconds."""

    name: str
    uuid: str
    owner: str
    """What it works for, such as ``endpoint-7``; empty for the node."""
    retries: bool
    retry_base: float
    """Seconds."""
    interval: float
    """Seconds; 0 when it does not run by the clock."""
    successes: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    last_error: str = ""
    """What it failed with the last time, empty when it did not."""
    last_success: float | None = None
    last_failure: float | None = None
