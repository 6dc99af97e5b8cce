"""Whether what is configured now is still what runs.

For:    whoever shows the agent's configuration. Needs: HiveView.   Gives: ConfigDrift, Change.
Source: Cilium 1.17, its drift checker, and the copies of the configuration its agent keeps.

Nothing takes effect before a restart: this only tells. A config-dir is watched, a mounted ConfigMap's swap
included; flags and variables cannot change while a process runs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.config import AgentConfig
from lifecycle import Health, HiveView, Hook, Jobs, Lifecycle, Loaded, Logger, Setting

SETTLE: Final = 0.05
"""Seconds in which several changes of the directory are one."""
RUNTIME_CONFIG: Final = "agent-runtime-config"
GIVEN_CONFIG: Final = "viper-agent-config"
_GENERATIONS: Final = 3


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
        self._directory = view.loaded.config_dir
        self._state_dir = config.state_dir
        self._health = health.child("drift")
        self._log = log
        self.changes: tuple[Change, ...] = ()
        """By name; empty while nothing differs."""
        lifecycle.append(Hook("keep a copy of the settings", self._keep_copy))
        if self._directory is None:
            self._health.ok("no config-dir: settings are from flags and variables, which cannot change")
        else:
            jobs.one_shot("watch the config-dir", self._watch)

    def settings(self) -> list[Setting]:
        """The settings in force."""
        return self._view.loaded.settings

    async def _keep_copy(self) -> None:
        """Write what runs where Cilium's agent does; a failure is logged, as nothing depends on it."""
        try:
            await to_thread.run_sync(self._write_copies)
        except OSError as error:
            self._log.warning("settings not copied", directory=str(self._state_dir), error=str(error))

    def _write_copies(self) -> None:
        running = {one.option.name: one.text for one in self.settings()}
        given = {one.option.name: one.text for one in self.settings() if one.origin != "default"}
        _rotate(self._state_dir, RUNTIME_CONFIG, "json", json.dumps(running, indent=1, sort_keys=True))
        # JSON of texts is YAML, too: no library is loaded for it
        _rotate(self._state_dir, GIVEN_CONFIG, "yaml", json.dumps(given, indent=1, sort_keys=True))

    async def _watch(self) -> None:
        async for _ in _changes(self._directory or Path()):
            await self.look()

    async def look(self) -> None:
        """Compare now."""
        found = tuple(_differences(self._view.loaded, await to_thread.run_sync(self._view.load)))
        before, self.changes = self.changes, found
        if not found:
            self._health.ok(f"{self._directory} says what runs")
            if before:
                self._log.info("configuration is again what runs")
        elif found != before:
            names = ", ".join(change.name for change in found)
            self._health.degraded(
                f"{self._directory} no longer says what runs ({names}): restart the agent to apply it, see"
                " hive config diff"
            )
            self._log.warning("configuration differs from what runs", settings=names)


def _differences(running: Loaded, configured: Loaded) -> Iterator[Change]:
    now = {one.option.name: one for one in configured.settings}
    for one in running.settings:
        name, text = one.option.name, one.text
        if (other := now.get(name)) is not None and other.value != one.value:
            yield Change(name, text, other.text, other.origin)
    for fault in configured.faults:
        yield Change("refused", "", fault.text, "")


async def _changes(directory: Path) -> AsyncIterator[None]:
    """One item at first, then one after every burst of changes, until the directory itself goes."""
    from asyncinotify import Inotify, Mask

    gone = Mask.DELETE_SELF | Mask.MOVE_SELF
    changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
    with Inotify() as inotify:
        inotify.add_watch(directory, gone | changed | Mask.ONLYDIR)
        yield
        while True:
            events = [await inotify.get()]
            with anyio.move_on_after(SETTLE):
                while True:
                    events.append(await inotify.get())
            if any(event.mask & (gone | Mask.IGNORED) for event in events):
                raise FileNotFoundError(f"the config-dir {directory} was removed or replaced")
            yield


def _rotate(directory: Path, name: str, suffix: str, text: str) -> None:
    """Write ``name.suffix``, the former ones being ``name-1.suffix`` and ``name-2.suffix``."""
    paths = [directory / f"{name}{f'-{n}' if n else ''}.{suffix}" for n in range(_GENERATIONS)]
    fresh = directory / f".{name}.new"
    fresh.write_text(text + "\n", encoding="utf-8")
    fresh.chmod(0o600)
    for older, newer in zip(reversed(paths), reversed(paths[:-1]), strict=False):
        if newer.exists():
            newer.replace(older)
    fresh.replace(paths[0])
