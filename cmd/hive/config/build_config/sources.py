"""The sources of settings of a command line, read one by one.

Source: Cilium 1.17, cilium-dbg build-config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hive.config.build_config.cluster import Cluster

ANNOTATION_PREFIX = "config.cilium.io/"
KINDS = ("config-map", "cilium-node-config", "node", "directory")

_TRIES = 10
"""Attempts to read a mounted ConfigMap that is swapped meanwhile."""

Report = Callable[[str], None]
"""Writes a line to the container's log."""


class SourceError(Exception):
    """An invalid source; one line."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source, named as in ``config-sources``."""

    kind: str
    namespace: str
    name: str

    @property
    def title(self) -> str:
        """``kind:namespace/name``."""
        return f"{self.kind}:{self.namespace}/{self.name}" if self.namespace else f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Found:
    """The settings of a source; a source with several objects has one of these per object."""

    source: Source
    values: Mapping[str, str]


def parse_source(text: str, namespace: str, node: str) -> Source:
    """Parse ``kind[:[namespace/]name]``; defaults are those of this pod. Raises SourceError."""
    kind, _, rest = text.partition(":")
    place, slash, name = rest.partition("/")
    match kind:
        case "config-map":
            return Source(kind, place, name) if slash else Source(kind, namespace, rest or "cilium-config")
        case "cilium-node-config":
            return Source(kind, place, name) if slash else Source(kind, rest or namespace, "")
        case "node":
            return Source(kind, "", rest or node)
        case "directory":
            return Source(kind, "", rest)
    raise SourceError(f"unknown config source {text!r}: expected one of {', '.join(KINDS)}, then :name")


def read_source(source: Source, cluster: Cluster, node: str, report: Report) -> list[Found]:
    """Return the source's settings, lowest precedence first. Raises ClusterError, SourceError, OSError."""
    match source.kind:
        case "config-map":
            values = cluster.config_map(source.namespace, source.name)
            if values is None:
                report(f"error: {source.title} not found: taken as empty")
            return [Found(source, values or {})]
        case "cilium-node-config":
            return _node_configs(source, cluster, node, report)
        case "node":
            return [Found(source, _node_overrides(source, cluster, report))]
    return [Found(source, read_directory(source.name))]


def _node_configs(source: Source, cluster: Cluster, node: str, report: Report) -> list[Found]:
    configs = sorted(cluster.node_configs(source.namespace), key=lambda one: one.name)
    if source.name:
        chosen = [one for one in configs if one.name == source.name]
        if not chosen:
            report(f"error: {source.title} not found: taken as empty")
    else:
        found = cluster.node(node)
        if found is None and configs:
            report(f"error: node {node!r} not found: no {source.kind} is taken")
        chosen = [one for one in configs if found is not None and one.selects(found.labels)]
    return [
        Found(Source(source.kind, one.namespace, one.name), one.defaults) for one in chosen if one.defaults
    ]


def _node_overrides(source: Source, cluster: Cluster, report: Report) -> dict[str, str]:
    """Return the settings in a node's metadata; annotations override labels. Raises SourceError."""
    node = cluster.node(source.name)
    if node is None:
        raise SourceError(f"{source.title} not found")
    values: dict[str, str] = {}
    for carried in (node.labels, node.annotations):
        for key, value in carried.items():
            if key.startswith(ANNOTATION_PREFIX):
                setting = key.removeprefix(ANNOTATION_PREFIX)
                if setting:
                    values[setting] = value
                else:
                    report(f"error: {source.title}: {key}: expected the name of a setting after the slash")
    return values


def read_directory(path: str) -> dict[str, str]:
    """Read a mounted ConfigMap, without the mount's own files. Raises OSError, SourceError."""
    directory = Path(path)
    if not directory.is_dir():
        raise SourceError(f"directory:{path}: expected a directory, such as a mounted ConfigMap")
    for _ in range(_TRIES):
        # The target of ..data never changes: the kubelet creates a new directory, and removes the old one.
        place = (directory / "..data").resolve() if (directory / "..data").is_dir() else directory
        try:
            return {
                file.name: file.read_text(encoding="utf-8")
                for file in sorted(place.iterdir())
                if file.is_file() and not file.name.startswith("..")
            }
        except FileNotFoundError:
            if place == directory:
                raise
    raise SourceError(f"directory:{path}: it changed whenever it was read; leave it alone and start again")
