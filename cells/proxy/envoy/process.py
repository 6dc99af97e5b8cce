"""Envoy's process: started, watched, started again. It outlives the agent: flows go on without one."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Final

import anyio
import msgspec

from cells.base.processes import detached, exit_text, process_ended
from cells.proxy.envoy.resources import EnvoyFiles, bootstrap
from lifecycle import HiveError, Logger

FOLDER: Final = "envoy"
"""Envoy's directory in the state directory."""
PID_FILE: Final = "envoy.pid"
PATIENCE: Final = 10.0
"""Seconds that an Envoy which is to end gets for that."""
DRAIN: Final = 5
"""Seconds after which the connections of a removed redirect are closed."""

FLUSH: Final = 100
"""Milliseconds after which Envoy flushes its access log."""


class EnvoyError(HiveError):
    """Envoy does not run."""


class _Running(msgspec.Struct):
    pid: int
    digest: str
    """Of what it was started with."""


class Process:
    """One Envoy of this node."""

    def __init__(self, program: Path, place: EnvoyFiles, log_file: Path, log: Logger) -> None:
        self._program = program
        self._place = place
        self._log_file = log_file
        self._log = log

    async def run(self, wanted: anyio.Event) -> None:
        """Have it run once it is wanted, and watch it. Raises EnvoyError when it ends, OSError."""
        began = msgspec.json.encode(bootstrap(self._place))
        command = self._command()
        stat = self._program.stat()
        digest = hashlib.sha256(
            b"\0".join([began, *map(os.fsencode, command), b"%d %d" % (stat.st_size, stat.st_mtime_ns)])
        ).hexdigest()
        running = _started(self._place)
        if running is not None and running.digest != digest:
            await self._end(running.pid)
            running = None
        if running is None:
            await wanted.wait()
            self._place.admin.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place.bootstrap.write_bytes(began)
            pid = detached(self._program, command, os.environ)
            (self._place.folder / PID_FILE).write_bytes(msgspec.json.encode(_Running(pid, digest)))
            self._log.info("Envoy was started", pid=pid, program=str(self._program))
        else:
            pid = running.pid
            self._log.info("Envoy goes on", pid=pid)
        await process_ended(pid)
        raise EnvoyError(f"Envoy ended, pid {pid}{exit_text(pid)}: see {self._log_file}")

    def _command(self) -> list[str]:
        return [
            str(self._program),
            *("-c", str(self._place.bootstrap)),
            *("--log-path", str(self._log_file), "--log-level", "warning"),
            *("--file-flush-interval-msec", str(FLUSH)),
            *("--drain-time-s", str(DRAIN), "--drain-strategy", "immediate", "--disable-hot-restart"),
        ]

    async def _end(self, pid: int) -> None:
        self._log.info("Envoy is ended: it was started otherwise", pid=pid)
        os.kill(pid, signal.SIGTERM)
        with anyio.move_on_after(PATIENCE):
            await process_ended(pid)
            return
        os.kill(pid, signal.SIGKILL)
        await process_ended(pid)


def end_envoy(state_dir: Path) -> list[str]:
    """End the Envoy that an agent with this state directory has started; what was ended. Raises OSError."""
    running = _started(EnvoyFiles(state_dir / FOLDER))
    if running is None:
        return []
    os.kill(running.pid, signal.SIGKILL)
    return [f"Envoy, pid {running.pid}"]


def _started(place: EnvoyFiles) -> _Running | None:
    """The one that an agent before this has started, if it runs."""
    try:
        running = msgspec.json.decode((place.folder / PID_FILE).read_bytes(), type=_Running)
        command = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, msgspec.MsgspecError):
        return None
    return running if os.fsencode(place.bootstrap) in command else None
