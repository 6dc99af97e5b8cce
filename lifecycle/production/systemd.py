"""Notifies systemd of readiness, status, liveness and timeouts.

Source: sd_notify(3), systemd.service(5).

In the unit: ``Type=notify``, and ``WatchdogSec=30`` for a watchdog. Without NOTIFY_SOCKET, nothing is sent.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping

from lifecycle.hooks import Hook, Lifecycle
from lifecycle.hooks.phase import Phase, Progress
from lifecycle.injection import Cell, invoke, module, provide
from lifecycle.process import Logger

__all__ = ["ServiceManager", "systemd"]

STATUS_SECONDS = 0.2
"""Minimum pause between two messages while hooks start and stop, as there may be thousands of steps."""
SLACK = 5.0
"""Seconds added to the hive's own timeouts: the hive names late hooks, systemd would only kill it."""
NAMED = 3
"""Maximum number of hooks in a status."""


class ServiceManager:
    """Sends READY=1, STATUS, STOPPING=1, EXTEND_TIMEOUT_USEC and WATCHDOG=1.

    A timer of the event loop sends the watchdog's message, so it stops if code blocks the loop: then systemd
    ends the service. It is sent from the start to the end, twice within systemd's limit.
    """

    def __init__(self, phase: Phase, lifecycle: Lifecycle, log: Logger) -> None:
        self._phase = phase
        self._log = log
        self._environment: Mapping[str, str] = os.environ
        self._socket: socket.socket | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._sent_stage = ""
        self._failed = False
        self._unfollow = phase.follow(self._on_phase)
        lifecycle.append(Hook("notify the service manager", stop=self._leave))

    def notify(self, **fields: str | int) -> None:
        """Send these fields in one message; a no-op outside of systemd. A failure is logged once."""
        address = self._environment.get("NOTIFY_SOCKET", "")
        if not address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        try:
            self._send(text, address)
        except OSError as error:
            if not self._failed:
                self._log.warning("the service manager cannot be notified", error=str(error))
            self._failed = True
        else:
            self._failed = False

    def _send(self, text: str, address: str) -> None:
        if not address.startswith(("/", "@")):
            raise OSError(f"NOTIFY_SOCKET={address}: expected a path, or @ and a name")
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        path = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket.sendto(text.encode(), path)

    def reloading(self) -> None:
        """The hive is reading its settings again; reloaded() follows."""
        self.notify(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)

    def reloaded(self, status: str) -> None:
        """The settings have been read again."""
        self.notify(READY=1, STATUS=status)

    def _on_phase(self) -> None:
        if not self._environment.get("NOTIFY_SOCKET"):
            return
        if self._phase.stage != self._sent_stage:
            self._sent_stage = self._phase.stage
            self._enter()
        elif self._soon is None and self._phase.stage in {"starting", "stopping"}:
            self._soon = asyncio.get_running_loop().call_later(STATUS_SECONDS, self._show)

    def _enter(self) -> None:
        match self._phase.stage:
            case "starting":
                self._send_watchdog()
                self._show()
            case "running":
                self.notify(READY=1, STATUS=f"running: {self._phase.look().started} hooks started")
            case "stopping":
                self.notify(STOPPING=1, STATUS="stopping")
                self._show()
            case _:
                self._close()

    def _show(self) -> None:
        """Send the progress, and how long it may take."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._phase.stage not in {"starting", "stopping"}:
            return
        progress = self._phase.look()
        within = int((progress.within + SLACK) * 1e6)
        self.notify(EXTEND_TIMEOUT_USEC=within, STATUS=_status(self._phase.stage, progress))

    def _send_watchdog(self) -> None:
        usec, pid = (self._environment.get(name, "") for name in ("WATCHDOG_USEC", "WATCHDOG_PID"))
        if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
            return
        self.notify(WATCHDOG=1)
        self._beat = asyncio.get_running_loop().call_later(int(usec) / 2e6, self._send_watchdog)

    async def _leave(self) -> None:
        """End with a disabled module; when the hive stops, continue until its end."""
        if self._phase.stage == "running":
            self._close()

    def _close(self) -> None:
        self._unfollow()
        for timer in (self._beat, self._soon):
            if timer is not None:
                timer.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _status(stage: str, progress: Progress) -> str:
    named = "; " + ", ".join(progress.busy[:NAMED]) if progress.busy else ""
    more = f" and {len(progress.busy) - NAMED} more" if len(progress.busy) > NAMED else ""
    if stage == "starting":
        return f"starting: {progress.started} of {progress.hooks} hooks{named}{more}"
    return f"stopping: {progress.hooks} hooks left{named}{more}"


def systemd() -> Cell:
    """Return the module ``systemd``, which notifies the service manager if that is systemd."""
    return module("systemd", "Notifies the service manager", provide(ServiceManager), invoke(ServiceManager))
