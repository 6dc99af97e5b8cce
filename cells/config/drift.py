"""Whether what is configured is still what runs, and copies of what ran.

Source: watches the config-dir; an event is only a hint, and everything is read and compared again.
Why:    an operator who edits a ConfigMap must see that a restart is due, and what it would change.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.base.metrics import Collector, MetricFamily, features, gauge
from cells.config import AgentConfig
from cells.unsupported import WithoutEffect
from lifecycle import Health, HiveView, Hook, Jobs, Lifecycle, Logger, Member, invoke, module, provide
from lifecycle.settings import Loaded, Setting

__all__ = ["Change", "ConfigDrift", "cell", "directory_changes", "file_changes"]


# Copies of the settings on disk, as Cilium's agent keeps them: of this start, and of the two before.
#
# Source: Cilium 1.17, the files agent-runtime-config.json and viper-agent-config.yaml in its state directory.
#         cilium-dbg reads the first while no agent answers.

RUNTIME_CONFIG: Final = "agent-runtime-config"
GIVEN_CONFIG: Final = "viper-agent-config"
FIELDS: Final = {
    "cluster-id": "ClusterID",
    "cluster-name": "ClusterName",
    "datapath-mode": "DatapathMode",
    "enable-bpf-masquerade": "EnableBPFMasquerade",
    "enable-cilium-network-policy": "EnableCiliumNetworkPolicy",
    "enable-endpoint-health-checking": "EnableEndpointHealthChecking",
    "enable-health-checking": "EnableHealthChecking",
    "enable-host-firewall": "EnableHostFirewall",
    "enable-icmp-rules": "EnableICMPRules",
    "enable-ipsec": "EnableIPSec",
    "enable-ipv4-egress-gateway": "EnableIPv4EgressGateway",
    "enable-k8s-networkpolicy": "EnableK8sNetworkPolicy",
    "enable-l7-proxy": "EnableL7Proxy",
    "enable-local-redirect-policy": "EnableLocalRedirectPolicy",
    "enable-policy": "EnablePolicy",
    "encrypt-node": "EncryptNode",
    "identity-allocation-mode": "IdentityAllocationMode",
    "ipam": "IPAM",
    "monitor-aggregation": "MonitorAggregation",
    "routing-mode": "RoutingMode",
}
"""Settings, and the fields of Cilium's DaemonConfig by which cilium-cli detects features."""
KTIME: Final = 0
"""Cilium's number for the clock of the conntrack maps: seconds since boot."""
_GENERATIONS: Final = 3


def write_copies(config: AgentConfig, settings: Iterable[Setting]) -> None:
    """Write both files, moving the earlier ones on. Raises OSError."""
    settings = list(settings)
    given = {one.option.name: one.text for one in settings if one.origin != "default"}
    _rotate(config.state, RUNTIME_CONFIG, "json", _text(runtime_config(config, settings)))
    # JSON of texts is YAML, too: no library is loaded for it
    _rotate(config.state, GIVEN_CONFIG, "yaml", _text(given))


def runtime_config(config: AgentConfig, settings: Iterable[Setting]) -> dict[str, object]:
    """Under Cilium's names what its tools may ask; under ``Settings`` every setting as text."""
    fields = {
        FIELDS[one.option.name]: one.value if isinstance(one.value, bool | int) else one.text
        for one in settings
        if one.option.name in FIELDS
    }
    return {
        **fields,
        "ClockSource": KTIME,
        "EnableIPv4": config.ipv4,
        "EnableIPv6": config.ipv6,
        "RunDir": str(config.state_dir),
        "Settings": {one.option.name: one.text for one in settings},
        "SocketPath": str(config.api_socket),
        "StateDir": str(config.state),
    }


def _text(values: dict[str, object] | dict[str, str]) -> str:
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def _rotate(directory: Path, name: str, suffix: str, text: str) -> None:
    """Write ``name.suffix``, earlier ones becoming ``name-1.suffix`` and ``name-2.suffix``."""
    paths = [directory / f"{name}{f'-{n}' if n else ''}.{suffix}" for n in range(_GENERATIONS)]
    fresh = directory / f".{name}.new"
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    for older, newer in zip(reversed(paths), reversed(paths[:-1]), strict=False):
        if newer.exists():
            newer.replace(older)
    fresh.replace(paths[0])


# Where the config-dir came from, when an init container made it: the ConfigMaps mounted beside it.
#
# Source: Cilium 1.17, the keys config-sources and config-sources-overrides; the kind "directory" is ours.
#
# Such a config-dir is a copy that is never updated: an edit shows only in the mounted ConfigMap.

SOURCES: Final = "config-sources"
OVERRIDES: Final = "config-sources-overrides"


class _Source(msgspec.Struct, frozen=True):
    kind: str
    name: str


def _sources(config_dir: Path) -> list[_Source]:
    """What it was made of; empty if it was made manually, or by another program. Raises OSError."""
    try:
        return msgspec.json.decode((config_dir / SOURCES).read_bytes(), type=list[_Source])
    except (FileNotFoundError, ValueError, RecursionError):
        return []


def mounted_sources(config_dir: Path) -> list[Path]:
    """The directories it was made of, the strongest last.

    None unless all of them are mounted here too, and all of them count whole: sources in the cluster, and
    keys that may not override, cannot be followed from here. Raises OSError.
    """
    sources = _sources(config_dir)
    try:
        overrides = json.loads((config_dir / OVERRIDES).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return []  # made manually, or by another program
    if not isinstance(overrides, dict) or any(value is not None for value in overrides.values()):
        return []
    found = [Path(source.name) for source in sources if source.kind == "directory"]
    return found if len(found) == len(sources) and all(map(_here, found)) else []


def _here(path: Path) -> bool:
    return path.is_absolute() and path.is_dir()


# Whether what is configured now is still what runs.
#
# Source: Cilium 1.17, its drift checker.
#
# Nothing takes effect before a restart: this only reports. A config-dir is watched, a mounted ConfigMap's
# swap included, and so is a YAML file that was named; flags and variables cannot change while a process runs.
# Of a config-dir that hive build-config made of mounted ConfigMaps, these are watched if they are mounted
# here too.

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
        async for _ in directory_changes(directories):
            await self.look()

    async def look(self) -> None:
        """Compare now."""
        found = tuple(
            _differences(self._view.loaded, await to_thread.run_sync(self._view.load, self._sources))
        )
        before, self.changes = self.changes, found
        if not found:
            self._health.ok(f"{self.places} matches the running configuration")
            if before:
                self._log.info("configuration matches the running one again")
        elif found != before:
            names = ", ".join(change.name for change in found if change.name != REFUSED)
            wrong = next((change.configured for change in found if change.name == REFUSED), "")
            todo = f"no agent would start from it ({wrong})" if wrong else "restart the agent to apply it"
            differing = f": {names}" if names else ""
            text = f"{self.places} no longer matches the running configuration{differing}; {todo}"
            self._health.degraded(f"{text}; see hive config diff")
            self._log.warning("configuration differs from the running one", settings=names, refused=wrong)


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


async def directory_changes(directories: Iterable[Path]) -> AsyncIterator[None]:
    """One item at first, then one after every burst of changes, until one of the directories goes."""
    from asyncinotify import Inotify, Mask

    removed = Mask.DELETE_SELF | Mask.MOVE_SELF
    changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
    with Inotify() as inotify:
        for directory in directories:
            inotify.add_watch(directory, removed | changed | Mask.ONLYDIR)
        yield
        while True:
            events = [await inotify.get()]
            with anyio.move_on_after(SETTLE):
                while True:
                    events.append(await inotify.get())
            for event in events:
                if event.mask & (removed | Mask.IGNORED):
                    raise FileNotFoundError(
                        f"{event.watch.path if event.watch else 'a directory'} was removed or replaced"
                    )
            yield


async def file_changes(path: Path) -> AsyncIterator[None]:
    """Iterate once at first, then after every burst of changes beside the file, which need not exist.

    Follows the nearest directory that exists, also in place of one that is replaced.
    """
    from asyncinotify import Inotify, Mask

    removed = Mask.DELETE_SELF | Mask.MOVE_SELF
    changed = Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM
    while True:
        place, replaced = _nearest(path), False
        with Inotify() as inotify:
            inotify.add_watch(place, changed | removed | Mask.ONLYDIR)
            while not replaced and place == _nearest(path):
                yield
                events = [await inotify.get()]
                with anyio.move_on_after(SETTLE):
                    while True:
                        events.append(await inotify.get())
                replaced = any(event.mask & (removed | Mask.IGNORED) for event in events)


def _nearest(path: Path) -> Path:
    return next(each for each in path.parents if each.is_dir())


# How many settings a restart would change, as Cilium's metric.
#
# Source: Cilium 1.17, cilium_drift_checker_config_delta.


def families(drift: ConfigDrift) -> Iterator[MetricFamily]:
    """One number."""
    yield gauge(
        "cilium_drift_checker_config_delta",
        "The number of settings that differ from the running ones, and take effect at the next restart",
        len(drift.changes),
    )


def drift_metrics(drift: ConfigDrift) -> Member[Collector]:
    """How many settings differ."""

    async def collect() -> Iterable[MetricFamily]:

        return families(drift)

    return Collector("config-drift", collect)


def config_features(view: HiveView) -> Member[Collector]:
    """Whether the config-dir was made of CiliumNodeConfigs too, as a feature in use.

    Source: Cilium 1.17, the kinds in config-sources.
    """
    directory = view.loaded.config_dir
    kinds = {source.kind for source in _sources(directory)} if directory is not None else set()
    enabled = "cilium-node-config" in kinds
    return features("config-features", lambda: {"adv_connect_and_lb_cilium_node_config_enabled": enabled})


cell = module(
    "config-drift",
    "Configuration that differs from the running one",
    provide(ConfigDrift, drift_metrics, config_features),
    invoke(ConfigDrift),
)
