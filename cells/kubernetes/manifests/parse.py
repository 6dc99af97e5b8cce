"""Objects out of the text of one file: YAML or JSON, several documents, lists.

Needs: nothing.   Gives: Contents, Parsed, Other, Problem, parse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from cells.kubernetes.manifests.values import wrong_value
from cells.kubernetes.objects import KINDS, Key, Kind, Object

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]|`?\$`?")
_YAML: Final = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"


class Problem(Exception):  # noqa: N818  # it is told to a person, with its place
    """What is wrong with a file, and where: line and column count from 1."""

    def __init__(self, line: int, column: int, what: str) -> None:
        super().__init__(f"{line}:{column}: {what}")
        self.line = line
        self.column = column
        self.what = what


class Place(NamedTuple):
    """Where something stands."""

    line: int
    column: int

    def problem(self, what: str) -> Problem:
        """Something wrong here."""
        return Problem(self.line, self.column, what)


class Parsed(NamedTuple):
    """One object of a file."""

    kind: Kind[Any]
    row: Object
    place: Place

    @property
    def key(self) -> Key:
        """Of the object."""
        return self.row.key


class Other(NamedTuple):
    """An object of a kind that is not read."""

    api_version: str
    kind: str
    place: Place


class Contents(NamedTuple):
    """What a file holds."""

    objects: list[Parsed]
    others: list[Other]


class _Loader(_Base):  # type: ignore[misc]  # which one depends on how PyYAML was built
    """Times stay text, as in JSON."""


_Loader.yaml_implicit_resolvers = {
    first: [one for one in found if one[0] != _TIMESTAMP]
    for first, found in _Base.yaml_implicit_resolvers.items()
}


def parse(text: bytes, kinds: tuple[Kind[Any], ...] = KINDS) -> Contents:
    """The objects of those kinds, and what others there are. All or nothing: raises Problem."""
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
                raise one.place.problem(f"{one.kind.kind} {name} stands in line {first.place.line} already")
    return Contents(list(found.values()), others)


def _documents(text: bytes) -> Iterator[tuple[Any, Any]]:
    loader = None
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            _refuse_twice(node)
            yield loader.construct_document(node), node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
        raise place.problem(error.problem or error.context or "no YAML") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        line = text[: getattr(error, "position", 0) or 0].count(b"\n") + 1
        raise Problem(line, 1, f"no YAML: {error}".splitlines()[0]) from error
    finally:
        if loader is not None:
            loader.dispose()


def _refuse_twice(node: Any) -> None:
    """A key twice in one mapping is a mistake, as one of the two would be lost."""
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
    """Each list and mapping once, however many aliases name it. Raises Problem for one within itself."""
    pending: list[Any] = [node]
    within: set[int] = set()
    done: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None:  # all of the next one has been seen
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
        inner = _child(node, "items")
        of = {} if name == "List" else {"apiVersion": version, "kind": name.removesuffix("List")}
        for number, item in enumerate(items):
            whole = {**of, **item} if isinstance(item, dict) else item
            yield from _objects(whole, _child(inner, number), kinds)
        return
    kind = kinds.get((version, name))
    yield _object(value, node, kind) if kind is not None else Other(version, name, place)


def _object(value: dict[str, Any], node: Any, kind: Kind[Any]) -> Parsed:
    metadata = value.get("metadata")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise _place(_child(node, "metadata")).problem(f"metadata of the {kind.kind} is no mapping")
    _check_name(metadata.get("name"), node, kind)
    namespace = metadata.get("namespace") or "default"
    value = {**value, "metadata": {**metadata, "namespace": namespace if kind.namespaced else ""}}
    try:
        row = kind.convert(value)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        told = path.strip("`").removeprefix("$").lstrip(".")
        shown = f"{told}: " if told else ""
        name = f"{kind.kind} {metadata['name']}"
        raise _place(_at(node, path)).problem(f"{name}: {shown}{what[:1].lower()}{what[1:]}") from error
    if wrong := wrong_value(kind, row):
        path, told = wrong
        raise _place(_at(node, path)).problem(f"{kind.kind} {metadata['name']}: {path[1:]}: {told}")
    return Parsed(kind, row, _place(node))


def _check_name(name: Any, node: Any, kind: Kind[Any]) -> None:
    if name is None or name == "":
        at = _child(node, "metadata") or node
        raise _place(at).problem(f"metadata.name of the {kind.kind} is missing")
    if not isinstance(name, str):
        at = _at(node, ".metadata.name")
        quoted = f'; write "{at.value}"' if isinstance(at, yaml.ScalarNode) else ""
        what = _YAML.get(type(name), "a value")
        raise _place(at).problem(f"metadata.name of the {kind.kind} is {what}, expected text{quoted}")


def _place(node: Any) -> Place:
    mark = node.start_mark
    return Place(mark.line + 1, mark.column + 1)


def _child(node: Any, step: str | int) -> Any:
    """The node of a field or an item; None when there is none."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step]
    return None


def _at(node: Any, path: str) -> Any:
    """The node a path of msgspec's leads to, as far as it goes."""
    for name, index in _STEP.findall(path.strip("`")):
        following = _child(node, name or (int(index) if index.isdigit() else 0)) if name or index else node
        if following is None:
            return node
        node = following
    return node
