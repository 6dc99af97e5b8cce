"""Counts and names an agent's calls with an effect outside of it, and kills the agent before any of them.

Before each such call of the agent the kernel notifies a child process of ours (seccomp user notification),
from whichever thread and library, ctypes or raw system call it comes.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.node import Lab
from tests.support.crash.calls import names, seccomp_filter
from tests.support.crash.supervisor import Control, supervise
from tests.support.waiting import eventually

QUIET = 20
"""Number of looks, 10 ms apart, without a new call and with every thread asleep, after which an agent counts
as idle.
"""


class Interposer:
    """Counts the calls of the agent that it started last; files are below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._filter = directory / "filter"
        self._filter.write_bytes(seccomp_filter())
        self._log = directory / "calls"
        self._control = Control()
        self._supervisor: Child[None] | None = None
        self._agent = 0
        names()  # learnt before the fork, once

    def start(self, lab: Lab, *settings: str, kill_at: int = 0, tracer: Sequence[str] = ()) -> int:
        """Start an agent with calls counted from 1; it is killed before its call ``kill_at``, if not 0."""
        self.close()
        self._control = Control()
        self._control.kill_at = kill_at
        where = self._directory / "supervisor"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(where))
            listening.listen(1)
            self._supervisor = Child(supervise, listening, self._log, self._control)
        try:
            script = str(Path(__file__).with_name("trap.py"))
            # Bytecode that is written makes a start's calls differ from those of the next one.
            plain = "env", "PYTHONDONTWRITEBYTECODE=1"
            wrapper = [*plain, *tracer, sys.executable, script, str(where), str(self._filter)]
            self._agent = agent_process.start(lab, *settings, wrapper=wrapper)
            return self._agent
        finally:
            # Connected or not: the child has it open.
            eventually(lambda: self._log.exists() or agent_process.running(lab) is None)
            where.unlink()

    def close(self) -> None:
        """Release the last agent, which has ended."""
        if self._supervisor is not None:
            self._supervisor.finish(within=60)
            self._supervisor = None
        self._log.unlink(missing_ok=True)

    def kill_after(self, calls: int) -> int:
        """Kill the running agent before its n-th next call; return the call's number."""
        number = self._control.counted + calls
        self._control.kill_at = number
        return number

    def rest(self) -> int:
        """Wait until the agent makes no more calls by itself; return how many it made."""
        seen: list[int] = [*range(-QUIET, 0)]

        def quiet() -> bool:
            # One that a busy machine does not let run makes no calls either.
            seen.append(self._control.counted if self._asleep() else -len(seen))
            return len(set(seen[-QUIET:])) == 1

        eventually(quiet)
        return seen[-1]

    def _asleep(self) -> bool:
        """Return whether the agent and its supervisor are blocked or have ended."""
        watched = (self._agent, self._supervisor.pid if self._supervisor is not None else 0)
        return all(_asleep(pid) for pid in watched if pid)

    @property
    def counted(self) -> int:
        """Return the number of calls so far; the one before which the agent was killed is the last."""
        return self._control.counted

    @property
    def lines(self) -> list[str]:
        """Return every call: its number (- if not counted, = if restarted), its name, its object."""
        return self._log.read_text().splitlines()


def _asleep(pid: int) -> bool:
    """Return whether no thread of a process is runnable; also true of one that has ended."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] not in {"R", "D", "t"} for stat in stats)
