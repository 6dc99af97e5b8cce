"""Writes the CNI configuration file: with it the container runtime knows that the node can have pods.

Reconciler: the settings become one file, as soon as both sockets serve and not before, and is restored.
Why:        kubelet takes the file for readiness of the node's network, so it must be true when it appears.
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


# The container runtime's directory of configurations: our file in it, and the others out of its way.

MODE: Final = 0o600
BACKUP: Final = ".cilium_bak"
OLD_NAME: Final = "05-cilium.conf"
"""What our file was called before it was a list."""
_CONFIGURATIONS: Final = (".conf", ".conflist", ".json")


def write_file(path: Path, wanted: bytes) -> bool:
    """Make the file hold ``wanted``, at once or not at all; False when it did already and was not touched.

    Makes missing directories. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if read_regular(path) == wanted:
            return False
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{path.name}.new")  # no name a runtime would read
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  # an open descriptor, with its mode
            os.fchmod(descriptor, MODE)
            file.write(wanted)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return True


def put_aside(own: Path, *, exclusive: bool) -> list[str]:
    """Rename configurations that would be read instead of ours; their names.

    Our own of an earlier make always, those of others when we are to be alone. Raises OSError.
    """
    aside = []
    for path in sorted(own.parent.iterdir()):
        foreign = exclusive and path.suffix in _CONFIGURATIONS and not path.name.startswith(".")
        if path.name == own.name or path.is_dir() or not (foreign or path.name == OLD_NAME):
            continue
        path.replace(path.with_name(path.name + BACKUP))
        aside.append(path.name)
    return aside


# Keeping the CNI configuration file written.

SETTLE: Final = 0.05
"""Seconds in which several changes of the directory are one."""


@after(CniServer, ApiServed)
class CniConfig:
    """Announces the node: its hook lets plugins at the delete queue again, its job writes the file.

    It depends on both servers, so it starts once they accept. A file that cannot be written degrades the
    module's health and is tried again. When it is to be the only one, the directory is watched: what others
    put there is renamed, and ours is put back. It stays when the agent stops.
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
        lifecycle.append(Hook("open the delete queue", self._announce))
        if settings.write_cni_conf_when_ready:
            jobs.one_shot("write", self._keep if settings.cni_exclusive else self.write)

    async def _announce(self) -> None:
        self._queue.release()
        if not self._settings.write_cni_conf_when_ready:
            self._health.ok("CNI configuration management disabled")

    async def write(self) -> None:
        """Write the file if it differs; errors are reported to health and raised."""
        try:
            written, aside = await to_thread.run_sync(self._write)
        except (OSError, NoTargetError) as error:
            self._health.degraded(f"failed to write CNI configuration file {self._path}: {error}", error)
            raise
        self._health.ok(f"successfully wrote CNI configuration file to {self._path}")
        for name in aside:
            self._log.info("renaming non-Cilium CNI configuration file", file=name, to=f"{name}.cilium_bak")
        if written:
            self._log.info("CNI configuration file written", path=str(self._path))

    def _write(self) -> tuple[bool, list[str]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = write_file(self._path, self._contents.read(self._path, self._skipped))
        return written, put_aside(self._path, exclusive=self._settings.cni_exclusive)

    def _skipped(self, what: str) -> None:
        self._log.warning("CNI configuration cannot be read", file=what)

    async def _keep(self) -> None:
        """Write, and again after every change of the directory, for ever; raises as :meth:`write` does."""
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            async for what in self._changes():
                if what:
                    self._log.info("activity in the CNI directory, writing again", change=what)
                await self.write()

    async def _changes(self) -> AsyncIterator[str]:
        """An empty text once the directory is watched, then what changed, until the directory itself goes."""
        from asyncinotify import Inotify, Mask

        removed = Mask.DELETE_SELF | Mask.MOVE_SELF
        changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
        try:
            inotify = Inotify()
            inotify.add_watch(self._path.parent, removed | changed | Mask.ATTRIB | Mask.ONLYDIR)
        except OSError as error:  # too many watches on this machine, say: pods need the file all the same
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
                if shown := sorted(name for name in names if not name.startswith(".")):
                    yield ", ".join(shown)  # a name with a dot is our own file on its way


def chaining_features(settings: CniConfigSettings) -> Member[Collector]:
    """How our plugin works with others, as a feature in use."""
    return features("chaining-features", lambda: {"datapath_chaining_enabled": settings.chaining_mode})


def contents(settings: CniConfigSettings, agent: AgentConfig) -> ConfigurationContents:
    """Of this node's file."""
    return ConfigurationContents(settings, agent.cni_socket, debug=agent.debug)


def chaining_mode(settings: CniConfigSettings) -> Member[ChainingMode]:
    """How our plugin works with others, as the API shows it."""
    return ChainingMode(settings.chaining_mode)


cell = group(
    module(
        "chaining",
        "How the CNI plugin works with others",
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
