"""Whether what is configured now is still what runs.

For:    the API and health. Needs: HiveView.   Gives: ConfigDrift, Change.
Source: Cilium 1.17, its drift checker.

Nothing takes effect before a restart: this only tells. A config-dir is watched, a mounted ConfigMap's swap
included, and so is a YAML file that was named; flags and variables cannot change while a process runs. Of a
config-dir that hive build-config made of mounted ConfigMaps, these are watched if they are mounted here too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.config import AgentConfig
from cells.config.drift.copies import write_copies
from cells.config.drift.mounted import mounted_sources
from cells.unserved import WithoutEffect
from lifecycle import Health, HiveView, Hook, Jobs, Lifecycle, Loaded, Logger, Setting

SETTLE: Final = 0.05
"""Seconds in which several changes of the directory are one."""


REFUSED: Final = "(refused)"
"""Stands where a change's name would: the setting is part of what is wrong."""


class Change(msgspec.Struct, frozen=True, rename="kebab"):
    """A setting that a restart would change."""

    name: str
    running: str
    """Its value now, as text."""
    configured: str
    """What a restart would make of it; what is wrong, if it is refused."""
    origin: str
    """Where the new value is from."""


class ConfigDrift:
    """What differs between the settings in force and those a restart would load."""

    def __init__(
        self,
        view: HiveView,
        config: AgentConfig,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._view = view
        file = view.loaded.config_file
        self._places = [place for place in (view.loaded.config_dir, file) if place is not None]
        self._sources: list[Path] = []
        self._config = config
        self._health = health.child("drift")
        self._log = log
        self.changes: tuple[Change, ...] = ()
        """By name, then what is wrong; empty while nothing differs."""
        lifecycle.append(Hook("keep a copy of the settings", self._keep_copy))
        if not self._places:
            self._health.ok(
                "no config-dir, no config file: settings are from flags and variables, which cannot change"
            )
        else:
            jobs.one_shot("watch what configures", self._watch)

    def settings(self) -> list[Setting]:
        """The settings in force."""
        return self._view.loaded.settings

    @property
    def places(self) -> str:
        """What may change while the agent runs, in words; empty when nothing does."""
        return " with ".join(map(str, reversed(self._places)))

    async def _keep_copy(self) -> None:
        """Write what runs where Cilium's agent does; a failure is logged, as nothing depends on it."""
        try:
            await to_thread.run_sync(write_copies, self._config, self.settings())
        except OSError as error:
            self._log.warning("settings not copied", directory=str(self._config.state), error=str(error))

    async def _watch(self) -> None:
        directory = self._view.loaded.config_dir
        if directory is not None and (sources := await to_thread.run_sync(mounted_sources, directory)):
            self._sources = sources
            file = self._view.loaded.config_file
            self._places = [*sources, *([] if file is None else [file])]
        directories = {place if place.is_dir() else place.parent for place in self._places}
        async for _ in _changes(directories):
            await self.look()

    async def look(self) -> None:
        """Compare now."""
        found = tuple(
            _differences(self._view.loaded, await to_thread.run_sync(self._view.load, self._sources))
        )
        before, self.changes = self.changes, found
        if not found:
            self._health.ok(f"{self.places} says what runs")
            if before:
                self._log.info("configuration is again what runs")
        elif found != before:
            names = ", ".join(change.name for change in found if change.name != REFUSED)
            wrong = next((change.configured for change in found if change.name == REFUSED), "")
            todo = f"no agent would start from it ({wrong})" if wrong else "restart the agent to apply it"
            told = f"{self.places} no longer says what runs{f': {names}' if names else ''}; {todo}"
            self._health.degraded(f"{told}; see hive config diff")
            self._log.warning("configuration differs from what runs", settings=names, refused=wrong)


def _differences(running: Loaded, configured: Loaded) -> Iterator[Change]:
    """Settings without effect are left out: a restart would change nothing."""
    now = {one.option.name: one for one in configured.settings}
    for one in sorted(running.settings, key=lambda one: one.option.name):
        if issubclass(one.option.struct, WithoutEffect):
            continue
        name, text = one.option.name, one.text
        if (other := now.get(name)) is not None and other.value != one.value:
            yield Change(name, text, other.text, other.origin)
    for fault in configured.faults:
        yield Change(REFUSED, "", fault.text, "")


async def _changes(directories: Iterable[Path]) -> AsyncIterator[None]:
    """One item at first, then one after every burst of changes, until one of the directories goes."""
    from asyncinotify import Inotify, Mask

    gone = Mask.DELETE_SELF | Mask.MOVE_SELF
    changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
    with Inotify() as inotify:
        for directory in directories:
            inotify.add_watch(directory, gone | changed | Mask.ONLYDIR)
        yield
        while True:
            events = [await inotify.get()]
            with anyio.move_on_after(SETTLE):
                while True:
                    events.append(await inotify.get())
            for event in events:
                if event.mask & (gone | Mask.IGNORED):
                    raise FileNotFoundError(
                        f"{event.watch.path if event.watch else 'a directory'}"
                        " with settings was removed or replaced"
                    )
            yield
