"""The processes of gobgpd: started, watched and ended.

Why:    each outlives the agent, so that no session ends with it. There is one for each BGP instance: a
        gobgpd has one AS, one router ID, one port and one set of policies, and so has an instance; what goes
        wrong in one leaves the others alone. A peer that may have crashed it has one of its own.
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

BESIDE: Final = "speaker"
"""Name of the socket and the log of a gobgpd that runs separately."""
LAUNCHER: Final = "launch"
"""The FIFO by which the pod of speakers is asked for a further gobgpd: ``start`` or ``end``, and a name."""
PLACES: Final = "/usr/bin:/usr/local/bin"
"""Where images and packages of distributions put it, whatever the agent's PATH."""
PATIENCE: Final = 10.0
"""Seconds that gobgpd gets to answer, and to end."""
LEAST_PAUSE: Final = 0.005
MOST_PAUSE: Final = 0.2
"""Seconds between two tries to connect to one that has just been started."""
LARGEST_LOG: Final = 1 << 20
"""Bytes after which a log is truncated: it may be on a tmpfs, and peers can cause lines."""


MOST_OWN: Final = 8
"""Peers of a node that have a gobgpd of their own, at most: each takes some 25 MB."""


class SpeakerError(HiveError):
    """There is no gobgpd for an instance."""


class _Started(msgspec.Struct):
    instance: str
    pid: int
    began: str
    """Its start time (see _began()), as pids are reused."""
    peer: str = ""

    @property
    def name(self) -> SpeakerName:
        """Whether it is of an instance or of one peer."""
        return SpeakerName(self.instance, self.peer)


class Speakers:
    """The gobgpd processes of this node: one for each instance, and those of isolated peers."""

    def __init__(self, settings: SpeakerSettings, state_dir: Path, log: Logger) -> None:
        self._external = settings.external_bgp_speaker
        self._program = settings.bgp_speaker_path
        self._folder = state_dir / FOLDER
        self._log = log
        self._launcher = self._folder / LAUNCHER

    @property
    def isolated(self) -> Path:
        """The file of isolated peers."""
        return self._folder / "isolated"

    @property
    def most_own(self) -> int:
        """How many peers may have one of their own; an earlier chart's speakers can start none."""
        return MOST_OWN if not self._external or self._launcher.is_fifo() else 0

    def socket(self, name: SpeakerName) -> Path:
        """Its gRPC socket."""
        return self._place(name, ".sock")

    def log(self, name: SpeakerName) -> Path:
        """Its log; one that runs separately may have none there."""
        return self._place(name, ".log")

    def _place(self, name: SpeakerName, suffix: str) -> Path:
        """A hash: names of instances may be longer than those of sockets."""
        if self._external and not name.peer:
            return self._folder / f"{BESIDE}{suffix}"
        text = f"{name.instance}\0{name.peer}" if name.peer else name.instance
        return self._folder / (hashlib.sha256(text.encode()).hexdigest()[:12] + suffix)

    def running(self) -> list[SpeakerName]:
        """Those that run; of those beside the agent the ones that it has used."""
        if self._external:
            known = [(path, one) for path, one in _records(self._folder) if not one.began]
            return [one.name for path, one in known if one.peer or path.stem == BESIDE]
        return [one.name for one in _running(self._folder)]

    async def ensure(self, name: SpeakerName) -> None:
        """Start it unless it runs; await its answer. Raises SpeakerError, GobgpUnreachableError, OSError."""
        if self._external and not name.peer:
            if (its := [one for one in self.running() if not one.peer]) not in ([], [name]):
                raise SpeakerError(
                    f"external-bgp-speaker=true: there is one speaker, for the instance {its[0]}, and"
                    f" none for {name}; leave one instance to this node, or let the agent start gobgpd"
                )
            async with connected(self.socket(name)):
                self._record(name)
            return
        with suppress(GobgpUnreachableError):
            async with connected(self.socket(name)) as gobgp:
                if name not in self.running():  # an agent was killed between its start and its record
                    pid = 0 if self._external else gobgp.pid
                    self._record(name, pid, _began(pid) if pid else "")
                return
        if self._external:
            self._launch("start", name)
            self._record(name)
        else:
            if name in self.running():  # an agent that was killed may have started it just now
                with suppress(SpeakerError):
                    await self._answers(name)
                    return
                await self.end(name)
            self._begin(name, self._found())
        await self._answers(name)

    async def end(self, name: SpeakerName, *, abruptly: bool = False) -> None:
        """End it: with SIGTERM, at which it sends Cease, or ``abruptly``, as in a crash. Raises OSError."""
        if self._external and not name.peer:
            self._place(name, ".json").unlink(missing_ok=True)
            return
        if self._external:
            with suppress(SpeakerError):  # it has ended with its pod
                self._launch("end", name)
        found = next((one for one in _running(self._folder) if one.name == name), None)
        if found is not None:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(found.pid)
                try:
                    await self._ended(handle, signal.SIGKILL if abruptly else signal.SIGTERM)
                finally:
                    os.close(handle)
            exit_code(found.pid)
        for suffix in (".json", ".sock", ".log"):
            self._place(name, suffix).unlink(missing_ok=True)

    def notice_end(self, name: SpeakerName) -> None:
        """Report how it has ended, if it was started by this process and has."""
        try:
            started = msgspec.json.decode(self._place(name, ".json").read_bytes(), type=_Started)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return
        if started.pid and (status := exit_code(started.pid)) is not None:
            log = self._place(name, ".log")
            self._log.warning("gobgpd ended", **name.fields, pid=started.pid, status=status, see=str(log))

    def _launch(self, what: str, name: SpeakerName) -> None:
        """Ask the pod of speakers for one, or to end it. Raises SpeakerError."""
        try:
            launcher = os.open(self._launcher, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise SpeakerError(
                f"external-bgp-speaker=true: no gobgpd for {name}: nothing reads {self._launcher}"
                f" ({error.strerror}); see the container isolated-peers of the pod cilium-bgp-speaker"
            ) from error
        with os.fdopen(launcher, "w") as commands:
            commands.write(f"{what} {self._place(name, '').name}\n")

    def cut_logs(self) -> None:
        """Truncate large logs. Raises OSError."""
        for log in self._folder.glob("*.log"):
            if log.stat().st_size > LARGEST_LOG:
                os.truncate(log, 0)

    def _found(self) -> Path:
        found = self._program or shutil.which("gobgpd") or shutil.which("gobgpd", path=PLACES)
        if found is None:
            raise SpeakerError("gobgpd: not found in PATH or /usr/bin; install it, or set bgp-speaker-path")
        return Path(found)

    def _begin(self, name: SpeakerName, program: Path) -> None:
        """In a session of its own, so that what ends the agent does not end it; with no file of others."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket, log = self.socket(name), self._place(name, ".log")
        socket.unlink(missing_ok=True)
        command = [str(program), "--api-hosts", f"unix://{socket}", "--pprof-disable", "-p"]
        logged = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            pid = detached(program, command, os.environ, {1: logged, 2: logged})
        finally:
            os.close(logged)
        self._record(name, pid, _began(pid))
        self._log.info("gobgpd was started", **name.fields, pid=pid, program=str(program))

    def _record(self, name: SpeakerName, pid: int = 0, began: str = "") -> None:
        started = _Started(name.instance, pid, began, name.peer)
        self._place(name, ".json").write_bytes(msgspec.json.encode(started))

    async def _answers(self, name: SpeakerName) -> None:
        log, pause = self._place(name, ".log"), LEAST_PAUSE
        with anyio.move_on_after(PATIENCE):
            while self._external or name in self.running():
                with suppress(GobgpUnreachableError):
                    async with connected(self.socket(name)):
                        return
                await anyio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE)
            self.notice_end(name)
            raise SpeakerError(f"gobgpd for the instance {name} ended when it was started: see {log}")
        raise SpeakerError(f"gobgpd for the instance {name} has not answered for {PATIENCE:g} s: see {log}")

    @staticmethod
    async def _ended(handle: int, number: signal.Signals) -> None:
        signal.pidfd_send_signal(handle, number)
        with anyio.move_on_after(PATIENCE):
            await pidfd_ended(handle)
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        await pidfd_ended(handle)


def end_speakers(state_dir: Path) -> list[str]:
    """End each gobgpd that an agent with this state directory has started: which. Raises OSError."""
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
    """Those that an agent, this or one before, has started and that run."""
    for _, started in _records(folder):
        if started.began and started.began == _began(started.pid):
            yield started


def _began(pid: int) -> str:
    """When a process has started, in ticks since the boot (proc(5)); empty for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
