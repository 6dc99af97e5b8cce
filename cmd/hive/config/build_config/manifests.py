"""A directory of manifests as the source of build-config's objects."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hive.config.build_config.cluster import ClusterError, Expression, Node, NodeConfig

SUFFIXES = {".yaml", ".yml", ".json"}


class Manifests:
    """The objects in YAML files below a directory, read on first use; a file may contain several."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: list[tuple[Path, dict[str, Any]]] | None = None

    def config_map(self, namespace: str, name: str) -> Mapping[str, str] | None:
        """See Cluster."""
        for path, found in self._objects("ConfigMap"):
            if (_namespace(found), _name(found)) == (namespace, name):
                return _texts(path, found, "data")
        return None

    def node_configs(self, namespace: str) -> list[NodeConfig]:
        """See Cluster."""
        return [
            NodeConfig(namespace, _name(found), _texts(path, spec, "defaults"), _selector(path, spec))
            for path, found in self._objects("CiliumNodeConfig")
            if _namespace(found) == namespace and isinstance(spec := found.get("spec") or {}, dict)
        ]

    def node(self, name: str) -> Node | None:
        """See Cluster."""
        for path, found in self._objects("Node"):
            if _name(found) == name:
                metadata = found["metadata"]
                return Node(_texts(path, metadata, "labels"), _texts(path, metadata, "annotations"))
        return None

    def _objects(self, kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        if self._read is None:
            self._read = list(self._load())
        return ((path, found) for path, found in self._read if found.get("kind") == kind)

    def _load(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        if not self._directory.is_dir():
            raise ClusterError(f"{self._directory}: expected a directory of manifests")
        for path in sorted(self._directory.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield from ((path, found) for found in _documents(path))


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterError(f"{path}: expected YAML or JSON: {' '.join(str(error).split())}") from error
    for found in documents:
        if isinstance(found, dict) and isinstance(found.get("metadata"), dict):
            yield found
            continue
        items = found.get("items") if isinstance(found, dict) else None
        if isinstance(items, list):
            yield from (one for one in items if isinstance(one, dict))
        elif found is not None:
            raise ClusterError(f"{path}: expected Kubernetes objects, with metadata")


def _name(found: Mapping[str, Any]) -> str:
    return str(found["metadata"].get("name", ""))


def _namespace(found: Mapping[str, Any]) -> str:
    return str(found["metadata"].get("namespace", "default"))


def _texts(path: Path, parent: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return a map of strings. Unquoted numbers and booleans are rejected, as by the API."""
    found = parent.get(key) or {}
    if not isinstance(found, dict):
        raise ClusterError(f"{path}: {key}: expected a mapping")
    for name, value in found.items():
        if not isinstance(value, str):
            raise ClusterError(f"{path}: {key}.{name}: expected a text, in quotes: {value!r}")
    return {str(name): value for name, value in found.items()}


def _selector(path: Path, spec: Mapping[str, Any]) -> tuple[Expression, ...] | None:
    selector = spec.get("nodeSelector")
    if selector is None:
        return None
    try:
        exact = [
            Expression(key, "In", (value,)) for key, value in _texts(path, selector, "matchLabels").items()
        ]
        listed = [
            Expression(one["key"], one["operator"], tuple(one.get("values") or ()))
            for one in selector.get("matchExpressions") or ()
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ClusterError(f"{path}: nodeSelector: expected a label selector") from error
    return (*exact, *listed)
