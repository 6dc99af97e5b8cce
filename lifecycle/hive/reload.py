"""Reads settings again while the hive runs, and restarts the modules that need changed ones."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from lifecycle.errors import HiveError, SettingsError, StopError
from lifecycle.hive.switch import Modules
from lifecycle.injection.resolve import Resolution
from lifecycle.settings.options import Group
from lifecycle.settings.sources import Loaded

__all__ = ["ChangedSetting", "Reload", "Reloaded"]


class ChangedSetting(msgspec.Struct, frozen=True):
    """An option with a new value. The texts do not show secrets."""

    name: str
    before: str
    after: str
    origin: str
    """Where the new value comes from, as text."""


class Reloaded(msgspec.Struct, frozen=True):
    """The result of reading the settings again."""

    changed: tuple[ChangedSetting, ...] = ()
    restarted: tuple[str, ...] = ()
    """Modules that need changed settings; the modules that need those have restarted, too."""
    at_restart: tuple[str, ...] = ()
    """Changed options that are needed outside of modules: they take effect when the process restarts."""


class Reload:
    """Reads the settings again and applies changes, when called. SIGHUP requests a call."""

    def __init__(
        self,
        name: str,
        modules: Modules,
        resolution: Callable[[], Resolution],
        loaded: Callable[[], Loaded],
        load: Callable[[], Loaded],
        put: Callable[[Loaded], None],
    ) -> None:
        self._name = name
        self._modules = modules
        self._resolution = resolution
        self._loaded = loaded
        self._load = load
        self._put = put
        self._busy = False
        self._requested: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def request(self) -> bool:
        """Request a reload, from any thread or a signal handler. False if nothing in the hive listens."""
        loop, requested = self._loop, self._requested
        if loop is None or requested is None:
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed: the hive has ended
            loop.call_soon_threadsafe(requested.set)
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which request() is accepted: await requested() inside it."""
        self._loop, self._requested = asyncio.get_running_loop(), asyncio.Event()
        try:
            yield
        finally:
            self._loop = self._requested = None

    async def requested(self) -> None:
        """Wait for the next request; several earlier ones count as one. Call it inside of listening()."""
        assert self._requested is not None  # noqa: S101  # as documented
        await self._requested.wait()
        self._requested.clear()

    async def __call__(self) -> Reloaded:
        """Read the settings and restart the modules that need changed ones.

        Raises SettingsError if the settings have faults, HiveError if a module does not start with them: then
        the previous settings are in force. Raises HiveError, too, if a reload is in progress.
        """
        if self._busy:
            raise HiveError(f"the settings of {self._name} are being read again already")
        self._busy = True
        try:
            return await self._reload()
        finally:
            self._busy = False

    async def _reload(self) -> Reloaded:
        old, new = self._loaded(), self._load()
        if new.faults:
            raise SettingsError(self._name, new.faults)
        before = {setting.option.name: setting for setting in old.settings}
        changed = tuple(
            ChangedSetting(
                setting.option.name, before[setting.option.name].text, setting.text, setting.origin
            )
            for setting in new.settings
            if setting.value != before[setting.option.name].value
        )
        groups = {group for group, filled in new.filled.items() if filled != old.filled.get(group)}
        modules, outside = self._affected(groups)
        off = set(self._modules.disabled)  # disabled by others
        failures = await self._restart(modules, new, off)
        if failures:
            again = await self._restart(modules, old, off)
            end = (
                f", and not with those before: {'; '.join(again)}" if again else "; those before are in force"
            )
            raise HiveError(f"{self._name} does not run with its new settings: {'; '.join(failures)}{end}")
        names = {option.name for group in outside for option in group.options}
        at_restart = tuple(change.name for change in changed if change.name in names)
        return Reloaded(changed, tuple(modules), at_restart)

    def _affected(self, groups: set[Group]) -> tuple[list[str], set[Group]]:
        """Return the outermost modules that need these settings, and the settings that are needed outside of
        modules.
        """
        resolution = self._resolution()
        root = resolution.assembly.root
        modules: dict[str, None] = {}
        outside: set[Group] = set()
        for node in resolution.order():
            for need in node.needs.values():
                if need.kind != "config" or (group := Group(need.call, need.prefix)) not in groups:  # type: ignore[arg-type]  # its struct
                    continue
                if node.scope is root:
                    outside.add(group)
                else:
                    modules[node.scope.id] = None
        inner = [module for module in modules if any(module.startswith(f"{outer}.") for outer in modules)]
        return [module for module in modules if module not in inner], outside

    async def _restart(self, modules: list[str], settings: Loaded, off: set[str]) -> list[str]:
        """Stop the modules, apply the settings, start the modules. Returns what failed to start."""
        for module in modules:
            with contextlib.suppress(StopError):  # logged, and disabled nevertheless
                await self._modules.disable(module)
        self._put(settings)
        failures = []
        for module in modules:
            try:
                if module not in off:
                    await self._modules.enable(module)
            except Exception as error:  # noqa: BLE001  # it is reported, and the settings go back
                failures.append(f"{module}: {error}")
        return failures
