"""What the state directory says about the endpoints that were there before the restart.

For:   RestoredEndpoints.   Needs: StateFiles.   Gives: OldEndpoints.
Source: Cilium 1.17, fetching old endpoints (disk only).
"""

import anyio.to_thread

from cells.endpoint import Scan, StateFiles
from lifecycle import Health, Hook, Lifecycle, Logger, NotStartedError


class OldEndpoints:
    """The saved endpoints; its hook reads them. Nothing is believed yet."""

    def __init__(self, files: StateFiles, lifecycle: Lifecycle, health: Health, log: Logger) -> None:
        self._files = files
        self._health = health.child("read")
        self._log = log
        self._scan: Scan | None = None
        lifecycle.append(Hook("read old endpoints", self._fetch))

    @property
    def scan(self) -> Scan:
        """What was found; raises NotStartedError before the hook has run."""
        if self._scan is None:
            raise NotStartedError("OldEndpoints.scan was read before the hook 'read old endpoints' ran")
        return self._scan

    async def _fetch(self) -> None:
        scan = await anyio.to_thread.run_sync(self._files.scan)
        for name in scan.removed:
            self._log.info("left-over of an interrupted write removed", directory=name)
        for name in scan.ignored:
            self._log.warning(
                "state of an endpoint that another directory holds too, ignored", directory=name
            )
        for number, why in scan.unreadable.items():
            self._log.warning("Unable to read endpoint state, ignoring", endpoint=number, error=why)
        if scan.unreadable:
            self._health.degraded(f"state of endpoints {', '.join(map(str, scan.unreadable))} cannot be read")
        else:
            self._health.ok(f"{len(scan.endpoints)} endpoints read")
        self._scan = scan
