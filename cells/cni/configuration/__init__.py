"""Writes the CNI configuration file, with which the container runtime reports the node's network ready.

Reconciler: the settings determine the file. It is written once both sockets serve, and restored after changes
by others.

Why: kubelet sets the node Ready when the file appears, so pods must be attachable then.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from cells.base.metrics import Collector, features
from cells.cni import CniServer, QueueLock
from cells.cni.configuration.contents import (
    CniConfigFileSettings,
    CniConfigSettings,
    ConfigurationContents,
    NoTargetError,
)
from cells.config import AgentConfig, ChainingMode
from cells.observe.bootstrap import ApiServed
from lifecycle import (
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    after,
    config,
    group,
    invoke,
    module,
    provide,
)
from lifecycle.settings import read_regular

__all__ = ["CniConfig", "CniConfigFileSettings", "CniConfigSettings", "cell"]


# Files in the container runtime's directory of configurations.

MODE: Final = 0o600
BACKUP: Final = ".cilium_bak"
OLD_NAME: Final = "05-cilium.conf"
"""The file's name in older versions, before it was a conflist."""
_CONFIGURATIONS: Final = (".conf", ".conflist", ".json")
_NEW: Final = ".new"
"""Suffix of the temporary file, which runtimes ignore."""


def write_file(path: Path, wanted: bytes) -> bool:
    """Replace the file's contents atomically; return False if they were equal.

    Creates missing directories. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if read_regular(path) == wanted:
            return False
    except FileNotFoundError:
        pass
    temporary = path.with_name(f".{path.name}{_NEW}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  # an open descriptor, with its mode
            os.fchmod(descriptor, MODE)
            file.write(wanted)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return True


def rename_others(own: Path, *, exclusive: bool) -> list[str]:
    """Rename configurations that the runtime would read instead of ours; return their names.

    The file of older versions is always renamed, those of others only if ``exclusive``. Raises OSError.
    """
    renamed = []
    for path in sorted(own.parent.iterdir()):
        foreign = exclusive and path.name.endswith(_CONFIGURATIONS)  # runtimes read hidden files, too
        if path.name == own.name or path.is_dir() or not (foreign or path.name == OLD_NAME):
            continue
        path.replace(path.with_name(path.name + BACKUP))
        renamed.append(path.name)
    return renamed


# Reconciliation of the file.

SETTLE: Final = 0.05
"""Seconds in which changes of the directory are combined."""


@after(CniServer, ApiServed)
class CniConfig:
    """Opens the delete queue in its start hook, and writes the configuration file in its job.

    It depends on both servers, so it starts once they accept. A failed write degrades the module's health and
    is retried. If exclusive, it watches the directory: configurations of others are renamed, and ours is
    restored. The file stays after the agent stops.
    """

    def __init__(
        self,
        settings: CniConfigFileSettings,
        contents: ConfigurationContents,
        queue: QueueLock,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._path = Path(settings.write_cni_conf_when_ready)
        self._queue = queue
        self._health = health
        self._log = log
        lifecycle.append(Hook("open the delete queue", self._open_queue))
        if settings.write_cni_conf_when_ready:
            jobs.one_shot("write", self._maintain if settings.cni_exclusive else self.write)

    async def _open_queue(self) -> None:
        self._queue.release()
        if not self._settings.write_cni_conf_when_ready:
            self._health.ok("CNI configuration management disabled")

    async def write(self) -> None:
        """Write the file if it differs; errors are reported to health and raised."""
        try:
            written, renamed = await to_thread.run_sync(self._write)
        except (OSError, NoTargetError) as error:
            self._health.degraded(f"failed to write CNI configuration file {self._path}: {error}", error)
            raise
        self._health.ok(f"successfully wrote CNI configuration file to {self._path}")
        for name in renamed:
            self._log.info("renaming non-Cilium CNI configuration file", file=name, to=f"{name}.cilium_bak")
        if written:
            self._log.info("CNI configuration file written", path=str(self._path))

    def _write(self) -> tuple[bool, list[str]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = write_file(self._path, self._contents.read(self._path, self._skipped))
        return written, rename_others(self._path, exclusive=self._settings.cni_exclusive)

    def _skipped(self, what: str) -> None:
        self._log.warning("CNI configuration cannot be read", file=what)

    async def _maintain(self) -> None:
        """Write the file, and again after every change of the directory. Never returns; raises as write()."""
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            async for what in self._changes():
                if what:
                    self._log.info("activity in the CNI directory, writing again", change=what)
                await self.write()

    async def _changes(self) -> AsyncIterator[str]:
        """Yield "" once the directory is watched, then the names of changed files.

        Ends when the directory is removed.
        """
        from asyncinotify import Inotify, Mask

        removed = Mask.DELETE_SELF | Mask.MOVE_SELF
        changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
        try:
            inotify = Inotify()
            inotify.add_watch(self._path.parent, removed | changed | Mask.ATTRIB | Mask.ONLYDIR)
        except OSError as error:  # e.g. too many inotify watches: pods need the file nevertheless
            await self.write()
            reason = error.strerror or str(error)
            self._health.ok(
                f"successfully wrote CNI configuration file to {self._path}; not watched: {reason}"
            )
            raise  # the job reports it, and retries
        with inotify:
            yield ""
            while True:
                events = [await inotify.get()]
                with anyio.move_on_after(SETTLE):
                    while True:
                        events.append(await inotify.get())
                if any(event.mask & (removed | Mask.IGNORED) for event in events):
                    return
                names = {str(event.name) for event in events if event.name is not None}
                if shown := sorted(names - {f".{self._path.name}{_NEW}"}):
                    yield ", ".join(shown)


def chaining_features(settings: CniConfigSettings) -> Member[Collector]:
    """Return the collector of the chaining mode as a feature."""
    return features("chaining-features", lambda: {"datapath_chaining_enabled": settings.chaining_mode})


def contents(settings: CniConfigSettings, agent: AgentConfig) -> ConfigurationContents:
    """Return the contents of this node's file."""
    return ConfigurationContents(settings, agent.cni_socket, debug=agent.debug)


def chaining_mode(settings: CniConfigSettings) -> Member[ChainingMode]:
    """Return the chaining mode for the API."""
    return ChainingMode(settings.chaining_mode)


cell = group(
    module(
        "chaining",
        "CNI chaining",
        config(CniConfigSettings),
        provide(chaining_features, chaining_mode, contents),
    ),
    module(
        "cni-config",
        "CNI configuration file",
        config(CniConfigFileSettings),
        provide(CniConfig),
        invoke(CniConfig),
    ),
)
