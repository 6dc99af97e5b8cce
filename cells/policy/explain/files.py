"""Manifests of a folder, with the line of every field: to say which rule of which file decides.

YAML and JSON, several documents in a file, lists of objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cells.kubernetes import KINDS, wrong_value

if TYPE_CHECKING:
    import yaml

SUFFIXES = (".yaml", ".yml", ".json")
_KINDS = {kind.kind: kind for kind in KINDS}
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class Place(msgspec.Struct, frozen=True, order=True):
    """A line of a file, 1-based."""

    file: str
    line: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Located(msgspec.Struct, frozen=True):
    """An object and where it is written.

    ``lines`` are 1-based, by the path of a field (``spec.ingress[0]``).
    """

    object: Mapping[str, Any]
    file: str
    lines: Mapping[str, int]

    def at(self, path: str) -> Place:
        """The place of a field, or of the nearest field around it."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return Place(self.file, self.lines.get(path, self.lines.get("", 1)))


class BadFile(msgspec.Struct, frozen=True):
    """A file that cannot be read, from some line on."""

    file: str
    reason: str
    line: int = 1


def read_folder(folder: Path) -> Iterator[Located | BadFile]:
    """Every object of the folder's manifests, in the order of files and documents. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            yield from read_file(path, str(path.relative_to(folder)))


def read_file(path: Path, name: str) -> Iterator[Located | BadFile]:
    """Every object of a file; a broken file yields what comes before the fault, and the fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        yield BadFile(name, f"byte {error.start}: not UTF-8")
        return
    import yaml  # the agent reads no files of policies, and is spared it

    loader = yaml.CSafeLoader(text)
    loader.yaml_implicit_resolvers = {  # times stay text, as in JSON
        first: [one for one in found if one[0] != _TIMESTAMP]
        for first, found in loader.yaml_implicit_resolvers.items()
    }
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            yield from _objects(loader.construct_document(node), node, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"column {mark.column + 1}: " if mark is not None else ""
        yield BadFile(name, f"{place}{error.problem or error}", mark.line + 1 if mark is not None else 1)
    finally:
        loader.dispose()


def _objects(document: Any, node: yaml.Node, file: str) -> Iterator[Located | BadFile]:
    from yaml import MappingNode

    if document is None:
        return
    if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
        yield BadFile(file, "expected a Kubernetes object with kind and metadata", node.start_mark.line + 1)
        return
    items = document.get("items")
    if document["kind"].endswith("List") and isinstance(items, list) and isinstance(node, MappingNode):
        listed = next(value for key, value in node.value if key.value == "items")
        for item, inner in zip(items, listed.value, strict=True):
            yield from _objects(item, inner, file)
        return
    located = Located(document, file, dict(_lines(node, "")))
    yield _fault(located) or located


def _fault(located: Located) -> BadFile | None:
    """Why the agent would not read an object; what policies say is checked with their rules."""
    kind = _KINDS.get(str(located.object["kind"]))
    if kind is None:
        return None
    version = located.object.get("apiVersion")
    if version != kind.api_version:
        place = located.at("apiVersion")
        told = f"{kind.kind} is read as {kind.api_version} only, not {version or 'without apiVersion'}"
        return BadFile(place.file, told, place.line)
    metadata = located.object.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        what = "missing" if name is None or name == "" else f"{name!r}, expected text"
        place = located.at("metadata.name")
        return BadFile(place.file, f"metadata.name of the {kind.kind} is {what}", place.line)
    try:
        row = kind.convert(located.object)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at ")
        path = at.strip("`").removeprefix("$").lstrip(".")
        place = located.at(path)
        shown = f"{path}: " if path else ""
        told = f"{kind.kind} {name}: {shown}{reason[:1].lower()}{reason[1:]}"
        return BadFile(place.file, told, place.line)
    if (wrong := wrong_value(kind, row)) is not None:
        path, reason = wrong[0].lstrip("."), wrong[1]
        place = located.at(path)
        return BadFile(place.file, f"{kind.kind} {name}: {path}: {reason}", place.line)
    return None


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    from yaml import MappingNode, SequenceNode

    yield path, node.start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            yield from _lines(value, inner)
            yield inner, key.start_mark.line + 1
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, f"{path}[{index}]")
