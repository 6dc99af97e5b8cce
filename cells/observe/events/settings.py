"""Settings of the events cell.

Needs: nothing.   Gives: EventsSettings.
"""

from typing import Final

from lifecycle import Settings

MOST_PAGES: Final = 1 << 14


class EventsSettings(Settings, frozen=True):
    """Buffers for the datapath's events. They take no memory while nobody watches."""

    monitor_num_pages: int = 64
    """Pages of each CPU's event buffer, a power of two."""

    monitor_queue_size: int = 4096
    """Events queued for each client before further ones are lost to it."""

    def validate(self) -> None:
        """Refuse sizes that cannot be; raises ValueError with one line."""
        pages = self.monitor_num_pages
        if not 1 <= pages <= MOST_PAGES or pages & (pages - 1):
            raise ValueError(f"monitor-num-pages={pages}: expected a power of two, 1 to {MOST_PAGES}")
        if self.monitor_queue_size < 1:
            raise ValueError(f"monitor-queue-size={self.monitor_queue_size}: expected at least 1")
