"""A folder of manifests as the source of objects, for a node without an API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from anyio import to_thread

from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import KubernetesSettings
from lifecycle import Health, Hook, Jobs, Lifecycle, Logger, Table

if TYPE_CHECKING:
    from asyncinotify import Event, Inotify

    from cells.kubernetes.manifest_parser import Folder

__all__ = ["ManifestFile", "ManifestsSource", "manifest_files"]


# One file of a folder of manifests.


class ManifestFile(msgspec.Struct, frozen=True):
    """State of one file of the folder."""

    name: str
    objects: int
    """Number of objects in the tables that the file defines."""
    error: str = ""
    """Error of the current file: ``file:line:column: message``."""
    left_out: str = ""
    """The first object of a suspicious kind: ``file:line:column: message``, and how many follow."""
    others: tuple[str, ...] = ()
    """Kinds that other programs use: ``Deployment``."""


# Keeps the tables of objects equal to a folder of manifests.
#
# Source: watches a folder (inotify), fills the tables of objects and Table[str, ManifestFile].

SETTLE: Final = 0.02
"""Seconds over which changes are merged."""
FILLED: Final = 10.0
"""Seconds without a change after which an emptied folder counts as refilled."""


def manifest_files() -> Table[str, ManifestFile]:
    """The files of the folder, by name."""
    return Table("manifests", key=lambda one: one.name)


class ManifestsSource:
    """Reads the folder at start, and each file again when it changes.

    A file takes effect as a whole: if it is invalid, its last valid objects stay. The tables are initialized
    once every file has been valid: before that, an object that is missing may be in an invalid file.

    If a folder loses several manifests at once, or is replaced by an empty one, it may be unmounted or in the
    middle of an update. All objects stay until the folder has manifests again, and no more are added for some
    seconds.
    """

    def __init__(
        self,
        settings: KubernetesSettings,
        resources: Resources,
        files: Table[str, ManifestFile],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._resources = resources
        self._files = files
        self._emptied = False
        """Whether the folder lost all its manifests, and is not refilled yet."""
        self._changed = anyio.Event()
        self._log = log
        if not settings.manifests_dir:
            return
        self._health = health.child("manifests")
        self._path = Path(settings.manifests_dir)
        self._watch: Inotify | None = None
        """The watch of the start hook, until the job takes it over."""
        lifecycle.append(Hook("read the manifests", self._start, stop=self._stop))
        jobs.one_shot("manifests", self._sync)
        jobs.one_shot("manifests-filled", self._prune_when_refilled)

    @cached_property
    def _folder(self) -> Folder:
        """The reader of the folder, for the kinds that are registered at first use."""
        from cells.kubernetes.manifest_parser import Folder  # imports PyYAML

        return Folder(self._path, self._resources.kinds)

    async def _start(self) -> None:
        for sink in self._resources.sinks():
            sink.begin()
        await anyio.Path(self._path).mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # The watch starts before files are read: a file that is being written is then read again.
            with suppress(OSError):  # the job retries, and reports the error
                self._watch = stack.enter_context(_watch(self._path))
            await self._read(None)
            stack.pop_all()

    async def _stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    async def _sync(self) -> None:
        """Follow the folder. Raises OSError when it cannot be watched."""
        async for names in self._changes():
            await self._read(names)

    async def _read(self, names: set[str] | None) -> None:
        try:
            await to_thread.run_sync(self._folder.read, names)
        except OSError as error:
            self._health.degraded(f"{self._path}: {error.strerror}; what was read last stays in force", error)
            raise
        if self._folder.empty and not self._emptied and len(self._files) > (0 if names is None else 1):
            self._emptied = True
            self._log.error("the folder of manifests is empty, objects stay in force", path=str(self._path))
        self._report()

    async def _prune_when_refilled(self) -> None:
        """Run forever: once an emptied folder is refilled, delete the objects that it lacks."""
        while True:
            changed = self._changed
            with anyio.move_on_after(None if not self._emptied or self._folder.empty else FILLED) as quiet:
                await changed.wait()
            if quiet.cancelled_caught:
                self._emptied = False
                self._log.info("the folder of manifests has files again", path=str(self._path))
                self._report()

    def _report(self) -> None:
        found = self._folder.objects()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        if self._emptied:
            for sink in self._resources.sinks():
                sink.change(found.get(sink.kind.qualified, {}), state="synced")
        elif self._folder.complete:
            for sink in self._resources.sinks():
                sink.replace(found.get(sink.kind.qualified, {}), state="synced")
        else:  # a missing object may be in an invalid file: delete none
            for sink in self._resources.sinks():
                sink.change(found.get(sink.kind.qualified, {}), state="waiting")
        self._report_files()

    def _report_files(self) -> None:
        files = self._folder.files()
        for one in files:
            before = self._files.get(one.name)
            if one.error and (before is None or before.error != one.error):
                self._log.warning("manifest cannot be read, its last good objects stay", error=one.error)
            if one.left_out and (before is None or before.left_out != one.left_out):
                self._log.warning("manifest has objects of kinds that are not read", left_out=one.left_out)
        with self._files.txn() as txn:
            txn.replace_all(files)
        if self._emptied:
            state = (
                f"has {len(files)} manifests again"
                if files
                else "is empty; write an empty manifest if this is intended"
            )
            self._health.degraded(f"{self._path} lost all manifests and {state}; all objects stay in force")
            return
        errors = [one.error for one in files if one.error]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            self._health.degraded(f"{errors[0]}{more}; its last good objects stay in force")
        else:
            left_out = "".join(f"; left out: {one.left_out}" for one in files if one.left_out)
            self._health.ok(f"{sum(one.objects for one in files)} objects of {len(files)} files{left_out}")

    async def _changes(self) -> AsyncIterator[set[str] | None]:
        """Yield names of changed files, or None if any file may have changed."""
        from asyncinotify import Mask

        from cells.kubernetes.manifest_parser import is_manifest

        removed = Mask.DELETE_SELF | Mask.MOVE_SELF
        first, self._watch = self._watch, None
        with first or _watch(self._path) as inotify:
            if first is None:
                yield None
            while True:
                events = [await inotify.get()]
                with anyio.move_on_after(SETTLE):
                    while True:
                        events.append(await inotify.get())
                if any(event.mask & (removed | Mask.IGNORED | Mask.Q_OVERFLOW) for event in events):
                    yield None
                    if any(event.mask & (removed | Mask.IGNORED) for event in events):
                        raise FileNotFoundError(2, "was removed", str(self._path))
                    continue
                names = {
                    str(event.name) for event in events if event.name is not None and self._is_complete(event)
                }
                if any(name.startswith("..") for name in names):  # a mounted ConfigMap is replaced as a whole
                    yield None
                elif names := {name for name in names if is_manifest(name)}:
                    yield names

    def _is_complete(self, event: Event) -> bool:
        """Whether to read the file now: a created file is still empty, but a link is complete."""
        from asyncinotify import Mask

        if not event.mask & Mask.CREATE:
            return True
        return event.name is not None and (self._path / event.name).is_symlink()


def _watch(folder: Path) -> Inotify:
    """Watch a folder and its entries. Raises OSError."""
    from asyncinotify import Inotify, Mask

    removed = Mask.DELETE_SELF | Mask.MOVE_SELF
    changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.ATTRIB
    inotify = Inotify()
    try:
        inotify.add_watch(folder, removed | changed | Mask.ONLYDIR)
    except OSError:
        inotify.close()
        raise
    return inotify
