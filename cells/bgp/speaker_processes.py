"""Start, find and stop the gobgpd processes of this node.

Input:  names of speakers.
Output: processes, with a socket, a log and a record each in the directory ``bgp`` of state-dir.
Why:    processes outlive the agent, so that its restart ends no session. Each BGP instance has a gobgpd,
        because a gobgpd has one ASN, router ID, port and set of policies; a failure affects only its
        instance. Peers that may have crashed a gobgpd have separate ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec

from cells.base.processes import detached, exit_code, pidfd_ended
from cells.bgp import FOLDER, SpeakerSettings
from cells.bgp.gobgpd import GobgpUnreachableError, connected
from cells.bgp.speaker_state import SpeakerName
from lifecycle import HiveError, Logger

__all__ = ["SpeakerError", "Speakers", "end_speakers"]

EXTERNAL_NAME: Final = "speaker"
"""Base name of the socket and log of a gobgpd that runs separately (external-bgp-speaker)."""
LAUNCHER: Final = "launch"
"""FIFO on which the speakers' pod receives commands: ``start`` or ``end``, and a name."""
SEARCH_PATH: Final = "/usr/bin:/usr/local/bin"
"""Search path of gobgpd in addition to the agent's PATH."""
PATIENCE: Final = 10.0
"""Timeout in seconds for gobgpd to answer, and to exit."""
MIN_PAUSE: Final = 0.005
MAX_PAUSE: Final = 0.2
"""Maximum seconds between two attempts to connect to a gobgpd that was just started."""
MAX_LOG: Final = 1 << 20
"""Size in bytes at which logs are truncated: they may be on a tmpfs, and peers can cause lines."""


MAX_ISOLATED: Final = 8
"""Maximum number of isolated peers per node: the gobgpd of each uses some 25 MB."""


class SpeakerError(HiveError):
    """No gobgpd could be started or used for an instance."""


class _Started(msgspec.Struct):
    instance: str
    pid: int
    began: str
    """Start time of the process (see _start_time()), as PIDs are reused."""
    peer: str = ""

    @property
    def name(self) -> SpeakerName:
        """The name of the speaker."""
        return SpeakerName(self.instance, self.peer)


class Speakers:
    """The gobgpd processes of this node: one per instance and isolated peer."""

    def __init__(self, settings: SpeakerSettings, state_dir: Path, log: Logger) -> None:
        self._external = settings.external_bgp_speaker
        self._program = settings.bgp_speaker_path
        self._folder = state_dir / FOLDER
        self._log = log
        self._launcher = self._folder / LAUNCHER

    @property
    def isolated(self) -> Path:
        """Path of the file of isolated peers."""
        return self._folder / "isolated"

    @property
    def most_own(self) -> int:
        """Maximum number of isolated peers; 0 if the speakers' pod has no launcher (earlier charts)."""
        return MAX_ISOLATED if not self._external or self._launcher.is_fifo() else 0

    def socket(self, name: SpeakerName) -> Path:
        """Path of the gRPC socket."""
        return self._path(name, ".sock")

    def log(self, name: SpeakerName) -> Path:
        """Path of the log; a gobgpd that runs separately may not write one."""
        return self._path(name, ".log")

    def _path(self, name: SpeakerName, suffix: str) -> Path:
        """Return a path by a hash of the name, as paths of Unix sockets are limited to 107 characters."""
        if self._external and not name.peer:
            return self._folder / f"{EXTERNAL_NAME}{suffix}"
        text = f"{name.instance}\0{name.peer}" if name.peer else name.instance
        return self._folder / (hashlib.sha256(text.encode()).hexdigest()[:12] + suffix)

    def running(self) -> list[SpeakerName]:
        """Return the running speakers; if they run separately, those that the agent has used."""
        if self._external:
            known = [(path, one) for path, one in _records(self._folder) if not one.began]
            return [one.name for path, one in known if one.peer or path.stem == EXTERNAL_NAME]
        return [one.name for one in _running(self._folder)]

    async def ensure(self, name: SpeakerName) -> None:
        """Start a speaker unless it runs, and wait until it answers.

        Raises SpeakerError, GobgpUnreachableError, OSError.
        """
        if self._external and not name.peer:
            if (others := [one for one in self.running() if not one.peer]) not in ([], [name]):
                raise SpeakerError(
                    f"external-bgp-speaker=true: there is one speaker, for the instance {others[0]}, and"
                    f" none for {name}; leave one instance to this node, or let the agent start gobgpd"
                )
            async with connected(self.socket(name)):
                self._record(name)
            return
        with suppress(GobgpUnreachableError):
            async with connected(self.socket(name)) as gobgp:
                if name not in self.running():  # an earlier agent was killed before it wrote the record
                    pid = 0 if self._external else gobgp.pid
                    self._record(name, pid, _start_time(pid) if pid else "")
                return
        if self._external:
            self._launch("start", name)
            self._record(name)
        else:
            if name in self.running():  # an earlier agent may have started it before it was killed
                with suppress(SpeakerError):
                    await self._wait_ready(name)
                    return
                await self.end(name)
            self._spawn(name, self._program_path())
        await self._wait_ready(name)

    async def end(self, name: SpeakerName, *, abruptly: bool = False) -> None:
        """Stop a speaker by SIGTERM, at which it sends Cease; ``abruptly``: by SIGKILL. Raises OSError."""
        if self._external and not name.peer:
            self._path(name, ".json").unlink(missing_ok=True)
            return
        if self._external:
            with suppress(SpeakerError):  # no launcher: gobgpd has exited with its pod
                self._launch("end", name)
        found = next((one for one in _running(self._folder) if one.name == name), None)
        if found is not None:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(found.pid)
                try:
                    await self._signal_and_wait(handle, signal.SIGKILL if abruptly else signal.SIGTERM)
                finally:
                    os.close(handle)
            exit_code(found.pid)
        for suffix in (".json", ".sock", ".log"):
            self._path(name, suffix).unlink(missing_ok=True)

    def notice_end(self, name: SpeakerName) -> None:
        """Log the exit status of a speaker that this process has started and that has exited."""
        try:
            started = msgspec.json.decode(self._path(name, ".json").read_bytes(), type=_Started)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return
        if started.pid and (status := exit_code(started.pid)) is not None:
            log = self._path(name, ".log")
            self._log.warning("gobgpd ended", **name.fields, pid=started.pid, status=status, see=str(log))

    def _launch(self, what: str, name: SpeakerName) -> None:
        """Send a command to the launcher of the speakers' pod. Raises SpeakerError."""
        try:
            launcher = os.open(self._launcher, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise SpeakerError(
                f"external-bgp-speaker=true: no gobgpd for {name}: nothing reads {self._launcher}"
                f" ({error.strerror}); see the container isolated-peers of the pod cilium-bgp-speaker"
            ) from error
        with os.fdopen(launcher, "w") as commands:
            commands.write(f"{what} {self._path(name, '').name}\n")

    def truncate_logs(self) -> None:
        """Truncate large logs. Raises OSError."""
        for log in self._folder.glob("*.log"):
            if log.stat().st_size > MAX_LOG:
                os.truncate(log, 0)

    def _program_path(self) -> Path:
        found = self._program or shutil.which("gobgpd") or shutil.which("gobgpd", path=SEARCH_PATH)
        if found is None:
            raise SpeakerError("gobgpd: not found in PATH or /usr/bin; install it, or set bgp-speaker-path")
        return Path(found)

    def _spawn(self, name: SpeakerName, program: Path) -> None:
        """Start gobgpd in its own session, without inherited descriptors; it outlives the agent."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket, log = self.socket(name), self._path(name, ".log")
        socket.unlink(missing_ok=True)
        command = [str(program), "--api-hosts", f"unix://{socket}", "--pprof-disable", "-p"]
        logged = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            pid = detached(program, command, os.environ, {1: logged, 2: logged})
        finally:
            os.close(logged)
        self._record(name, pid, _start_time(pid))
        self._log.info("gobgpd was started", **name.fields, pid=pid, program=str(program))

    def _record(self, name: SpeakerName, pid: int = 0, began: str = "") -> None:
        started = _Started(name.instance, pid, began, name.peer)
        self._path(name, ".json").write_bytes(msgspec.json.encode(started))

    async def _wait_ready(self, name: SpeakerName) -> None:
        log, pause = self._path(name, ".log"), MIN_PAUSE
        with anyio.move_on_after(PATIENCE):
            while self._external or name in self.running():
                with suppress(GobgpUnreachableError):
                    async with connected(self.socket(name)):
                        return
                await anyio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            self.notice_end(name)
            raise SpeakerError(f"gobgpd for the instance {name} ended when it was started: see {log}")
        raise SpeakerError(f"gobgpd for the instance {name} has not answered for {PATIENCE:g} s: see {log}")

    @staticmethod
    async def _signal_and_wait(handle: int, number: signal.Signals) -> None:
        signal.pidfd_send_signal(handle, number)
        with anyio.move_on_after(PATIENCE):
            await pidfd_ended(handle)
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        await pidfd_ended(handle)


def end_speakers(state_dir: Path) -> list[str]:
    """Send SIGTERM to each gobgpd of this state directory; return a text for each. Raises OSError."""
    ended = []
    for one in _running(state_dir / FOLDER):
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGTERM)
            ended.append(f"gobgpd of the BGP instance {one.name}, pid {one.pid}")
    return ended


def _records(folder: Path) -> Iterator[tuple[Path, _Started]]:
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            yield path, msgspec.json.decode(path.read_bytes(), type=_Started)


def _running(folder: Path) -> Iterator[_Started]:
    """Yield the records of running processes that this or an earlier agent has started."""
    for _, started in _records(folder):
        if started.began and started.began == _start_time(started.pid):
            yield started


def _start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot (proc(5)); empty if it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
