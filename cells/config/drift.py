"""Reports settings that differ from the running ones, and writes copies of the running settings to disk.

Watches the config-dir; an event is only a hint, after which everything is read and compared again. Thus a
user who edits a ConfigMap sees that a restart is due, and what it would change.
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


# Copies of the settings on disk, in Cilium's format: of this start, and of the two previous ones.
#
# Source: Cilium 1.17, agent-runtime-config.json and viper-agent-config.yaml in its state directory.
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
"""Setting -> field of Cilium's DaemonConfig, by which cilium-cli detects features."""
KTIME: Final = 0
"""Cilium's value of a conntrack clock in seconds since boot."""
_GENERATIONS: Final = 3


def write_copies(config: AgentConfig, settings: Iterable[Setting]) -> None:
    """Write both files and rotate the previous ones. Raises OSError."""
    settings = list(settings)
    given = {one.option.name: one.text for one in settings if one.origin != "default"}
    _rotate(config.state, RUNTIME_CONFIG, "json", _text(runtime_config(config, settings)))
    # JSON is valid YAML, so no YAML library is imported
    _rotate(config.state, GIVEN_CONFIG, "yaml", _text(given))


def runtime_config(config: AgentConfig, settings: Iterable[Setting]) -> dict[str, object]:
    """Return the settings in Cilium's fields, and all settings as strings under ``Settings``."""
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
    """Write ``name.suffix``; previous files become ``name-1.suffix`` and ``name-2.suffix``."""
    paths = [directory / f"{name}{f'-{n}' if n else ''}.{suffix}" for n in range(_GENERATIONS)]
    fresh = directory / f".{name}.new"
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    for older, newer in zip(reversed(paths), reversed(paths[:-1]), strict=False):
        if newer.exists():
            newer.replace(older)
    fresh.replace(paths[0])


# The sources of a config-dir that an init container has built: the ConfigMaps mounted beside it.
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
    """Return the sources of a config-dir; empty if it was not built by hive build-config. Raises OSError."""
    try:
        return msgspec.json.decode((config_dir / SOURCES).read_bytes(), type=list[_Source])
    except (FileNotFoundError, ValueError, RecursionError):
        return []


def mounted_sources(config_dir: Path) -> list[Path]:
    """Return the source directories of a config-dir, the highest precedence last.

    Empty unless all sources are mounted here and may override all keys: sources in the cluster and restricted
    keys cannot be followed. Raises OSError.
    """
    sources = _sources(config_dir)
    try:
        overrides = json.loads((config_dir / OVERRIDES).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return []  # created manually or by another program
    if not isinstance(overrides, dict) or any(overrides.values()):
        return []
    found = [Path(source.name) for source in sources if source.kind == "directory"]
    return found if len(found) == len(sources) and all(map(_is_mounted, found)) else []


def _is_mounted(path: Path) -> bool:
    return path.is_absolute() and path.is_dir()


# Compares the configuration now with the running one.
#
# Source: Cilium 1.17, its drift checker.
#
# Nothing takes effect before a restart; this only reports. A config-dir is watched, including the swap of a
# mounted ConfigMap, and so is a YAML file given by name; flags and variables cannot change while a process
# runs. If hive build-config built the config-dir from mounted ConfigMaps, these are watched if they are
# mounted here, too.

SETTLE: Final = 0.05
"""Seconds in which several changes of a directory are batched."""


REFUSED: Final = "(refused)"
"""Name of a Change for an invalid configuration."""


class Change(msgspec.Struct, frozen=True, rename="kebab"):
    """A setting that a restart would change."""

    name: str
    running: str
    """The current value as text."""
    configured: str
    """The value after a restart, or the error if it is invalid."""
    origin: str
    """The source of the new value."""


class ConfigDrift:
    """Compares the configuration with the running settings whenever a source changes."""

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
        self._watched = [place for place in (view.loaded.config_dir, file) if place is not None]
        self._sources: list[Path] = []
        self._config = config
        self._health = health.child("drift")
        self._log = log
        self.changes: tuple[Change, ...] = ()
        """The differences by name, then the errors; empty without any."""
        lifecycle.append(Hook("write copies of the settings", self._write_copies))
        if not self._watched:
            self._health.ok(
                "no config-dir, no config file: settings are from flags and variables, which cannot change"
            )
        else:
            jobs.one_shot("watch configuration", self._watch)

    def settings(self) -> list[Setting]:
        """Return the running settings."""
        return self._view.loaded.settings

    @property
    def watched(self) -> str:
        """The watched sources, as text; empty if there are none."""
        return " with ".join(map(str, reversed(self._watched)))

    async def _write_copies(self) -> None:
        """Write the copies; a failure is logged, since nothing depends on them."""
        try:
            await to_thread.run_sync(write_copies, self._config, self.settings())
        except OSError as error:
            self._log.warning(
                "cannot write copies of the settings", directory=str(self._config.state), error=str(error)
            )

    async def _watch(self) -> None:
        directory = self._view.loaded.config_dir
        if directory is not None and (sources := await to_thread.run_sync(mounted_sources, directory)):
            self._sources = sources
            file = self._view.loaded.config_file
            self._watched = [*sources, *([] if file is None else [file])]
        directories = {place if place.is_dir() else place.parent for place in self._watched}
        async for _ in directory_changes(directories):
            await self.compare()

    async def compare(self) -> None:
        """Compare now."""
        found = tuple(
            _differences(self._view.loaded, await to_thread.run_sync(self._view.load, self._sources))
        )
        before, self.changes = self.changes, found
        if not found:
            self._health.ok(f"{self.watched} matches the running configuration")
            if before:
                self._log.info("configuration matches the running one again")
        elif found != before:
            names = ", ".join(change.name for change in found if change.name != REFUSED)
            wrong = next((change.configured for change in found if change.name == REFUSED), "")
            todo = f"no agent would start from it ({wrong})" if wrong else "restart the agent to apply it"
            differing = f": {names}" if names else ""
            text = f"{self.watched} no longer matches the running configuration{differing}; {todo}"
            self._health.degraded(f"{text}; see hive config diff")
            self._log.warning("configuration differs from the running one", settings=names, refused=wrong)


def _differences(running: Loaded, configured: Loaded) -> Iterator[Change]:
    """Yield the differences, except of settings without effect, which a restart would not change."""
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
    """Yield at first, then after every burst of changes.

    Raises FileNotFoundError if a directory is removed or replaced.
    """
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
    """Yield at first, then after every burst of changes beside a file, which need not exist.

    Follows the nearest existing directory, also when it is replaced.
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


# Metrics of configuration drift.
#
# Source: Cilium 1.17, cilium_drift_checker_config_delta.


def families(drift: ConfigDrift) -> Iterator[MetricFamily]:
    """Yield the number of differences."""
    yield gauge(
        "cilium_drift_checker_config_delta",
        "The number of settings that differ from the running ones, and take effect at the next restart",
        len(drift.changes),
    )


def drift_metrics(drift: ConfigDrift) -> Member[Collector]:
    """Contribute the number of differences to the metrics."""

    async def collect() -> Iterable[MetricFamily]:

        return families(drift)

    return Collector("config-drift", collect)


def config_features(view: HiveView) -> Member[Collector]:
    """Contribute whether the config-dir has CiliumNodeConfigs as sources, as a feature in use.

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
