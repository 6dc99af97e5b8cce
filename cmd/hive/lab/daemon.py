"""Programs of a lab that outlive the command that starts them: agents, etcd, FRR.

Each has a log and a pid file, by which later commands find it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hive.lab.namespaces import Namespaces
from hive.lab.node import LabError, wait_exited

POLL = 0.02


@dataclass(frozen=True, slots=True)
class Daemon:
    """A program by its pid file, whether it runs or not."""

    name: str
    """For error messages."""
    pidfile: Path
    log: Path

    @property
    def pid(self) -> int | None:
        """The pid; None if it does not run."""
        try:
            pid, started = self.pidfile.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if _start_time(int(pid)) == started else None

    def start(
        self, inside: Namespaces, command: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> int:
        """Start the program inside namespaces, in its own session; return its pid."""
        with self.log.open("ab") as log:
            process = inside.popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        process.returncode = 0  # Popen must not wait for it: it outlives this process
        self.pidfile.write_text(f"{process.pid} {_start_time(process.pid)}")
        return process.pid

    def wait(self, pid: int, is_ready: Callable[[], bool], within: float) -> float:
        """Wait until the program is ready; return the seconds.

        Raises LabError with the end of its log if it exits or the time runs out.
        """
        began = time.monotonic()
        while not is_ready():
            if wait_exited(pid, POLL):
                _reap(pid)
                raise LabError(f"{self.name} ended instead of serving:\n{self.log_end()}")
            if time.monotonic() - began > within:
                raise LabError(f"{self.name} did not serve within {within:g} s:\n{self.log_end()}")
        return time.monotonic() - began

    def end(self, number: signal.Signals, within: float) -> bool:
        """Send a signal and wait until the program has exited; False after ``within`` seconds."""
        pid = self.pid
        if pid is None:
            return True
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        exited = wait_exited(pid, within)
        if exited:
            _reap(pid)
        return exited

    def kill(self) -> None:
        """Kill the program with SIGKILL. Raises LabError if it survives."""
        if not self.end(signal.SIGKILL, 30.0):
            raise LabError(f"{self.name} survives SIGKILL")

    def log_end(self, lines: int = 12) -> str:
        """Return the last lines of the log."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (it printed nothing)"


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # another process started it
        os.waitpid(pid, 0)


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, None if it has exited: a later process with its pid differs.

    Source: proc_pid_stat(5), field 22.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
