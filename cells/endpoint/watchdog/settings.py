"""How often endpoints are compared with the kernel.

Needs: nothing.   Gives: WatchdogSettings.
"""

from lifecycle import Duration, Settings, seconds


class WatchdogSettings(Settings, frozen=True):
    """How often endpoints are compared with the kernel."""

    endpoint_bpf_prog_watchdog_interval: Duration = seconds(30)
    """How often programs and map rows of endpoints are compared with the kernel; 0s: only on its
    notifications."""

    def validate(self) -> None:
        """Refuse less than a second; raises ValueError with one line."""
        value = self.endpoint_bpf_prog_watchdog_interval
        if value and value < 1:
            raise ValueError(f"endpoint-bpf-prog-watchdog-interval={value}: expected 0s, or 1s and more")
