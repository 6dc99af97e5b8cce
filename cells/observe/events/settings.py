"""Settings of the events cell.

Needs: nothing.   Gives: EventsSettings.
"""

from typing import Final

from lifecycle import Settings

MOST_PAGES: Final = 1 << 14


class EventsSettings(Settings, frozen=True):
    """How much room the datapath's events have. None of it is taken while nobody watches."""

    monitor_num_pages: int = 64
    """Pages of memory for events of each CPU, a power of two."""

    monitor_queue_size: int = 4096
    """Events that wait for each watcher before more are lost to it."""

    def validate(self) -> None:
        """Refuse sizes that cannot be; raises ValueError with one line."""
        pages = self.monitor_num_pages
        if not 1 <= pages <= MOST_PAGES or pages & (pages - 1):
            raise ValueError(f"monitor-num-pages={pages}: expected a power of two, 1 to {MOST_PAGES}")
        if self.monitor_queue_size < 1:
            raise ValueError(f"monitor-queue-size={self.monitor_queue_size}: expected at least 1")
