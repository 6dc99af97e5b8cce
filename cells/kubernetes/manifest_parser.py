"""Parses manifests: validates objects, detects mistaken kinds, reads the files of a folder.

Source: k8s.io/kubernetes/pkg/apis/core/validation (containerPort, hostPort, ValidateService), and
        discovery/validation.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml
from msgspec.structs import fields

from cells.kubernetes.manifests import ManifestFile
from cells.kubernetes.objects import KINDS
from cells.kubernetes.objects.core import (
    ENDPOINT_SLICES,
    PODS,
    SERVICE_TYPES,
    SERVICES,
    EndpointPort,
    EndpointSlice,
    ServicePort,
    ServiceSpec,
)
from cells.kubernetes.objects.kind import Key, Kind, Object

__all__ = ["wrong_value"]


_KINDS: Final = frozenset({PODS.qualified, SERVICES.qualified, ENDPOINT_SLICES.qualified})
_MIN_PORT: Final = {
    "port": 1,
    "container_port": 1,
    "host_port": 0,
    "node_port": 0,
    "target_port": 0,
    "health_check_node_port": 0,
}
"""Fields that hold a port, and their minimum; 0 means no port."""
_PROTOCOLS: Final = ("TCP", "UDP", "SCTP", "")
_POLICIES: Final = ("Cluster", "Local", "")
_ENUM_VALUES: Final[Mapping[type[msgspec.Struct], Mapping[str, tuple[str, ...]]]] = {
    ServiceSpec: {
        "type": (*SERVICE_TYPES, ""),
        "session_affinity": ("None", "ClientIP", ""),
        "external_traffic_policy": _POLICIES,
        "internal_traffic_policy": _POLICIES,
    },
    ServicePort: {"protocol": _PROTOCOLS},
    EndpointPort: {"protocol": _PROTOCOLS},
    EndpointSlice: {"address_type": ("IPv4", "IPv6", "FQDN")},
}
"""Fields with a fixed set of values; an empty text means the default."""


def wrong_value(kind: Kind[Any], row: Object) -> tuple[str, str] | None:
    """Return the path of the first invalid value (``.spec.ports[0].port``), and the error text."""
    if kind.qualified not in _KINDS:
        return None
    return next(_faults(row, ""), None)


def _faults(part: Any, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, msgspec.Struct):
        words = _ENUM_VALUES.get(type(part), {})
        for field in fields(part):
            value, path = getattr(part, field.name), f"{at}.{field.encode_name}"
            smallest = _MIN_PORT.get(field.name)
            if value is not None and value not in words.get(field.name, (value,)):
                *most, last = filter(None, words[field.name])
                yield path, f"{value!r}; expected {', '.join(most)} or {last}"
            elif smallest is None:
                yield from _faults(value, path)
            elif isinstance(value, int) and not smallest <= value < 1 << 16:
                yield path, f"{value}; expected a port, 1 to 65535"
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from _faults(one, f"{at}[{number}]")


# Kinds that are not read: those of Kubernetes are for other programs, unknown ones may be mistakes.

_OF_KUBERNETES: Final[Mapping[str, frozenset[str]]] = {
    group: frozenset(kinds.split())
    for group, kinds in {
        "": "Binding ComponentStatus ConfigMap Endpoints Event LimitRange PersistentVolume "
        "PersistentVolumeClaim PodTemplate ReplicationController ResourceQuota Secret ServiceAccount",
        "apps": "ControllerRevision DaemonSet Deployment ReplicaSet StatefulSet",
        "autoscaling": "HorizontalPodAutoscaler",
        "batch": "CronJob Job",
        "policy": "PodDisruptionBudget",
    }.items()
}
"""Kinds of Kubernetes 1.36 by group; all other groups of Kubernetes end in ``.k8s.io``."""
_OF_CILIUM: Final = frozenset(
    [
        "CiliumBGPAdvertisement",
        "CiliumBGPClusterConfig",
        "CiliumBGPNodeConfig",
        "CiliumBGPNodeConfigOverride",
        "CiliumBGPPeerConfig",
        "CiliumBGPPeeringPolicy",
        "CiliumClusterwideEnvoyConfig",
        "CiliumEnvoyConfig",
        "CiliumExternalWorkload",
        "CiliumGatewayClassConfig",
    ]
)


def mistake(api_version: str, name: str, kinds: Iterable[Kind[Any]]) -> str:
    """Return what is suspicious about a kind that is not read; empty for one of another program."""
    group = api_version.rpartition("/")[0]
    by_name = {kind.kind: kind for kind in kinds}
    if name in by_name:
        kind = by_name[name]
        return "" if kind.api_version == api_version else f"{name} is read as {kind.api_version} only"
    if name in _OF_KUBERNETES.get(group, ()) or group.endswith(".k8s.io"):
        return ""
    if group == "cilium.io" and name in _OF_CILIUM:
        return f"{name} is not served"
    names = {*by_name, *_OF_KUBERNETES.get(group, ())}
    near = get_close_matches(name, sorted(names), n=1, cutoff=0.85)
    return f"{name} is not known" + (f"; is it {near[0]}?" if near else "")


# Parses one file: YAML or JSON, several documents, lists of objects.

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]|`?\$`?")
_YAML: Final = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"


class ManifestProblem(Exception):  # noqa: N818  # a message to a person, with its place
    """An error in a file, with its place: line and column count from 1."""

    def __init__(self, line: int, column: int, what: str) -> None:
        super().__init__(f"{line}:{column}: {what}")
        self.line = line
        self.column = column
        self.what = what


class ManifestPlace(NamedTuple):
    """A place in a file."""

    line: int
    column: int

    def problem(self, what: str) -> ManifestProblem:
        """Return an error at this place."""
        return ManifestProblem(self.line, self.column, what)


class Parsed(NamedTuple):
    """One object of a file."""

    kind: Kind[Any]
    row: Object
    place: ManifestPlace

    @property
    def key(self) -> Key:
        """Key of the object."""
        return self.row.key


class Other(NamedTuple):
    """An object of a kind that is not read."""

    api_version: str
    kind: str
    place: ManifestPlace


class ManifestContents(NamedTuple):
    """The objects of a file."""

    objects: list[Parsed]
    others: list[Other]


class _Loader(_Base):  # type: ignore[misc]  # which one depends on how PyYAML was built
    """Loads YAML, but keeps timestamps as text, as in JSON."""


_Loader.yaml_implicit_resolvers = {
    first: [one for one in found if one[0] != _TIMESTAMP]
    for first, found in _Base.yaml_implicit_resolvers.items()
}


def parse(text: bytes, kinds: tuple[Kind[Any], ...] = KINDS) -> ManifestContents:
    """Parse the objects of ``kinds``, and list all others.

    Raises ManifestProblem for any error in the file.
    """
    by_name = {(kind.api_version, kind.kind): kind for kind in kinds}
    found: dict[tuple[str, Key], Parsed] = {}
    others: list[Other] = []
    for value, node in _documents(text):
        for one in _objects(value, node, by_name):
            if isinstance(one, Other):
                others.append(one)
                continue
            first = found.setdefault((one.kind.qualified, one.key), one)
            if first is not one:
                name = "/".join(part for part in one.key if part)
                raise one.place.problem(
                    f"{one.kind.kind} {name} is defined in line {first.place.line} already"
                )
    return ManifestContents(list(found.values()), others)


def _documents(text: bytes) -> Iterator[tuple[Any, Any]]:
    loader = None
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            _refuse_duplicates(node)
            yield loader.construct_document(node), node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = ManifestPlace(mark.line + 1, mark.column + 1) if mark else ManifestPlace(1, 1)
        raise place.problem(error.problem or error.context or "not YAML") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        line = text[: getattr(error, "position", 0) or 0].count(b"\n") + 1
        raise ManifestProblem(line, 1, f"not YAML: {error}".splitlines()[0]) from error
    finally:
        if loader is not None:
            loader.dispose()


def _refuse_duplicates(node: Any) -> None:
    """Refuse a duplicate key of a mapping, since one of its values would be lost."""
    for one in _collections(node):
        if not isinstance(one, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for key, _ in one.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _place(key).problem(f"{key.value} is twice in one mapping")
                seen.add(key.value)


def _collections(node: Any) -> Iterator[Any]:
    """Yield each list and mapping once, despite aliases. Raises ManifestProblem if one contains itself."""
    pending: list[Any] = [node]
    within: set[int] = set()
    done: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None:  # all children of the next one are done
            left = id(pending.pop())
            within.discard(left)
            done.add(left)
        elif id(one) in within:
            raise _place(one).problem("it contains itself, by an alias")
        elif id(one) not in done and not isinstance(one, yaml.ScalarNode):
            within.add(id(one))
            yield one
            mapping = isinstance(one, yaml.MappingNode)
            pending += (one, None, *([value for _, value in one.value] if mapping else one.value))


def _objects(value: Any, node: Any, kinds: Mapping[tuple[str, str], Kind[Any]]) -> Iterator[Parsed | Other]:
    if value is None:
        return
    place = _place(node)
    if not isinstance(value, dict):
        raise place.problem("expected an object with apiVersion and kind")
    version, name = value.get("apiVersion"), value.get("kind")
    if not isinstance(version, str) or not isinstance(name, str) or not version or not name:
        missing = "kind" if isinstance(version, str) and version else "apiVersion"
        raise place.problem(f"{missing} is missing; expected an object with apiVersion and kind")
    items = value.get("items")
    if name.endswith("List") and isinstance(items, list):
        inner = _child_node(node, "items")
        of = {} if name == "List" else {"apiVersion": version, "kind": name.removesuffix("List")}
        for number, item in enumerate(items):
            whole = {**of, **item} if isinstance(item, dict) else item
            yield from _objects(whole, _child_node(inner, number), kinds)
        return
    kind = kinds.get((version, name))
    yield _object(value, node, kind) if kind is not None else Other(version, name, place)


def _object(value: dict[str, Any], node: Any, kind: Kind[Any]) -> Parsed:
    metadata = value.get("metadata")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise _place(_child_node(node, "metadata")).problem(f"metadata of the {kind.kind} is not a mapping")
    _check_name(metadata.get("name"), node, kind)
    namespace = metadata.get("namespace") or "default"
    value = {**value, "metadata": {**metadata, "namespace": namespace if kind.namespaced else ""}}
    try:
        row = kind.convert(value)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        text = path.strip("`").removeprefix("$").lstrip(".")
        shown = f"{text}: " if text else ""
        name = f"{kind.kind} {metadata['name']}"
        raise _place(_node_at(node, path)).problem(f"{name}: {shown}{what[:1].lower()}{what[1:]}") from error
    if wrong := wrong_value(kind, row):
        path, text = wrong
        raise _place(_node_at(node, path)).problem(f"{kind.kind} {metadata['name']}: {path[1:]}: {text}")
    return Parsed(kind, row, _place(node))


def _check_name(name: Any, node: Any, kind: Kind[Any]) -> None:
    if name is None or name == "":
        at = _child_node(node, "metadata") or node
        raise _place(at).problem(f"metadata.name of the {kind.kind} is missing")
    if not isinstance(name, str):
        at = _node_at(node, ".metadata.name")
        quoted = f'; write "{at.value}"' if isinstance(at, yaml.ScalarNode) else ""
        what = _YAML.get(type(name), "a value")
        raise _place(at).problem(f"metadata.name of the {kind.kind} is {what}, expected text{quoted}")


def _place(node: Any) -> ManifestPlace:
    mark = node.start_mark
    return ManifestPlace(mark.line + 1, mark.column + 1)


def _child_node(node: Any, step: str | int) -> Any:
    """Return the node of a field or an item; None if it does not exist."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step]
    return None


def _node_at(node: Any, path: str) -> Any:
    """Return the node at a path of msgspec, or the deepest existing one on the path."""
    for name, index in _STEP.findall(path.strip("`")):
        following = (
            _child_node(node, name or (int(index) if index.isdigit() else 0)) if name or index else node
        )
        if following is None:
            return node
        node = following
    return node


# The files of a folder, each with its last valid objects.

SUFFIXES: Final = (".yaml", ".yml", ".json")
MAX_FILE_SIZE: Final = 64 * 1024 * 1024
"""Maximum bytes of a file."""


class _Read(msgspec.Struct, frozen=True):
    stamp: tuple[int, int, int]
    objects: tuple[Parsed, ...]
    error: str = ""
    ever_valid: bool = True
    left_out: str = ""
    others: tuple[str, ...] = ()


class Folder:
    """Reads a folder; an invalid file keeps its last valid objects."""

    def __init__(self, path: Path, kinds: tuple[Kind[Any], ...] = KINDS) -> None:
        self._path = path
        self._kinds = kinds
        self._files: dict[str, _Read] = {}

    @property
    def complete(self) -> bool:
        """Whether every file has been valid once; otherwise a missing object may be in an invalid file."""
        return all(one.ever_valid for one in self._files.values())

    @property
    def empty(self) -> bool:
        """Whether the folder has no manifest."""
        return not self._files

    def read(self, names: Iterable[str] | None = None) -> bool:
        """Read the named files, or all; return whether anything has changed. Raises OSError."""
        if names is None:
            present = {one.name for one in os.scandir(self._path)}
            names = present | set(self._files)
        before = dict(self._files)
        for name in sorted(names):
            if is_manifest(name):
                self._look(name)
        return before != self._files

    def files(self) -> list[ManifestFile]:
        """Return the state of every file, by name."""
        clashes = self._merged()[1]
        return [
            ManifestFile(name, len(one.objects), one.error or clashes.get(name, ""), one.left_out, one.others)
            for name, one in sorted(self._files.items())
        ]

    def objects(self) -> dict[str, dict[Key, Object]]:
        """Return all objects by kind (``pods``) and key.

        If two files define an object, the first file counts.
        """
        return self._merged()[0]

    def _merged(self) -> tuple[dict[str, dict[Key, Object]], dict[str, str]]:
        merged: dict[str, dict[Key, Object]] = defaultdict(dict)
        owners: dict[tuple[str, Key], str] = {}
        clashes: dict[str, str] = {}
        for name, read in sorted(self._files.items()):
            for one in read.objects:
                owner = owners.setdefault((one.kind.qualified, one.key), name)
                if owner == name:
                    merged[one.kind.qualified][one.key] = one.kind.stored(one.row)
                    continue
                shown = "/".join(part for part in one.key if part)
                place = f"{self._path / name}:{one.place.line}:{one.place.column}"
                clashes.setdefault(
                    name, f"{place}: {one.kind.kind} {shown} is defined in {owner} already, which is used"
                )
        return merged, clashes

    def _look(self, name: str) -> None:
        path = self._path / name
        last = self._files.get(name)
        try:
            found = path.stat()
        except FileNotFoundError:
            self._files.pop(name, None)
            return
        except OSError as error:
            self._files[name] = self._broken(last, (0, 0, 0), f"{path}: {error.strerror}")
            return
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if not path.is_file() or (last is not None and last.stamp == stamp):
            return
        if found.st_size > MAX_FILE_SIZE:
            text = f"{path}: {found.st_size} bytes; expected at most {MAX_FILE_SIZE}"
            self._files[name] = self._broken(last, stamp, text)
            return
        try:
            objects, others = parse(path.read_bytes(), self._kinds)
        except ManifestProblem as error:
            self._files[name] = self._broken(last, stamp, f"{path}:{error}")
        except OSError as error:
            self._files[name] = self._broken(last, stamp, f"{path}: {error.strerror}")
        else:
            left_out, rest = self._classify_unread(path, others)
            self._files[name] = _Read(stamp, tuple(objects), left_out=left_out, others=rest)

    def _broken(self, last: _Read | None, stamp: tuple[int, int, int], error: str) -> _Read:
        if last is None:
            return _Read(stamp, (), error, ever_valid=False)
        return msgspec.structs.replace(last, stamp=stamp, error=error)

    def _classify_unread(self, path: Path, others: list[Other]) -> tuple[str, tuple[str, ...]]:
        """Split objects that are not read: one line about suspicious ones, and the kinds of the others."""
        text = [(one, mistake(one.api_version, one.kind, self._kinds)) for one in others]
        doubtful = [(one.place, what) for one, what in text if what]
        rest = tuple(sorted({one.kind for one, what in text if not what}))
        if not doubtful:
            return "", rest
        place, what = doubtful[0]
        more = f" (and {len(doubtful) - 1} more)" if len(doubtful) > 1 else ""
        return f"{path}:{place.line}:{place.column}: {what}{more}", rest


def is_manifest(name: str) -> bool:
    """Whether a file of this name is read; hidden files and backups of editors are not."""
    return name.endswith(SUFFIXES) and not name.startswith(".")
