"""Sees to it that the programs stay in force, and pinned.

For:    the agent.   Needs: Datapath, Jobs.   Gives: DatapathWatchdog.
Why:    an attached program without the one it jumps to drops what pods send; without pins, the next start
        would attach to every interface again.
"""

from typing import Final

from cells.datapath.datapath import Datapath
from lifecycle import Jobs, Logger, seconds

INTERVAL: Final = seconds(30)


class DatapathWatchdog:
    """A job; what it cannot put right fails it, which shows as degraded, and is tried again."""

    def __init__(self, datapath: Datapath, jobs: Jobs, log: Logger) -> None:
        self.found = 0
        """Programs that were missing, so far."""
        self._datapath = datapath
        self._log = log
        jobs.timer("compare programs", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Look at the entries and the pins, and put back what is missing."""
        if wrong := await self._datapath.repair():
            self.found += len(wrong)
            self._log.warning("programs were taken out of force, put back", programs=", ".join(wrong))
