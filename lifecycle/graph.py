"""The graph as a value: what there is, who needs whom, what it sets and what it runs.

Needs:  a built resolution.
Gives:  Graph with tree(), dot(), json(); graph_of() makes it.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from lifecycle.constructors import Constructor
from lifecycle.keys import type_name
from lifecycle.resolve import Resolution
from lifecycle.sources import Setting
from lifecycle.values import show

if TYPE_CHECKING:
    from lifecycle.build import Build
    from lifecycle.supervisor import HookNode

__all__ = [
    "VERSION",
    "ConstructorInfo",
    "Edge",
    "Graph",
    "HookInfo",
    "InvokeInfo",
    "ModuleInfo",
    "SettingInfo",
    "graph_of",
]

VERSION = 1
"""Of the JSON form; raised when a field changes its meaning or goes."""


class ModuleInfo(msgspec.Struct, frozen=True):
    """A module; the hive itself is the one without a parent."""

    id: str
    title: str
    parent: str | None


class ConstructorInfo(msgspec.Struct, frozen=True):
    """Something that provides a type."""

    id: str
    name: str
    kind: str
    """provide, supply, config or replace."""
    module: str
    provides: str
    private: bool
    built: bool
    """Whether something invoked needs it."""
    replaced: bool
    file: str
    line: int


class InvokeInfo(msgspec.Struct, frozen=True):
    """A function that is invoked."""

    id: str
    name: str
    module: str
    file: str
    line: int


class Edge(msgspec.Struct, frozen=True):
    """`source` needs `target`, both ids. In JSON: from, to."""

    source: str
    target: str
    parameter: str


class SettingInfo(msgspec.Struct, frozen=True):
    """An option with its value."""

    name: str
    module: str
    struct: str
    type: str
    value: str
    origin: str


class HookInfo(msgspec.Struct, frozen=True):
    """A hook, in starting order."""

    id: str
    name: str
    module: str
    constructor: str
    """Id of the constructor or invoked function that registered it."""
    after: tuple[str, ...]
    """Ids of the hooks it waits for."""


class Graph(msgspec.Struct, frozen=True):
    """The graph of a hive."""

    name: str
    modules: tuple[ModuleInfo, ...]
    constructors: tuple[ConstructorInfo, ...]
    edges: tuple[Edge, ...]
    invokes: tuple[InvokeInfo, ...]
    settings: tuple[SettingInfo, ...]
    hooks: tuple[HookInfo, ...]

    def json(self) -> str:
        """One JSON object: version, name and an array of each kind."""
        data: dict[str, Any] = {"version": VERSION, **msgspec.to_builtins(self)}
        data["edges"] = [{"from": e.source, "to": e.target, "parameter": e.parameter} for e in self.edges]
        return msgspec.json.format(msgspec.json.encode(data).decode(), indent=2)

    def tree(self) -> str:
        """Modules as an indented text, with what each provides, sets, invokes and runs."""
        from lifecycle.render import tree

        return tree(self)

    def dot(self) -> str:
        """Graphviz: a cluster per module, an arrow from who needs to what is needed."""
        from lifecycle.render import dot

        return dot(self)


def graph_of(
    resolution: Resolution, build: "Build", hooks: "list[HookNode]", settings: list[Setting]
) -> Graph:
    """The graph of what was built: edges are read from the very providers that ran."""
    ids = _ids(resolution)
    by_provider = {provider: node for node, provider in build.providers.items()}
    hook_ids = {hook: f"{ids[hook.owner]}:{number}" for number, hook in enumerate(hooks)}
    structs = {node.call: node for node in resolution.active if node.kind == "config"}
    return Graph(
        name=resolution.assembly.root.id,
        modules=tuple(
            ModuleInfo(scope.id, scope.title, scope.parent.id if scope.parent else None)
            for scope in resolution.assembly.scopes
        ),
        constructors=tuple(
            ConstructorInfo(
                ids[node],
                node.name,
                node.kind,
                node.scope.id,
                type_name(node.key),
                node.private,
                node in build.instances,
                node.replaced,
                node.place.file,
                node.place.line,
            )
            for node in (*resolution.assembly.constructors, *resolution.assembly.replaces)
        ),
        edges=tuple(
            Edge(ids[node], ids[by_provider[provider]], name)
            for node in resolution.nodes
            for name, provider in _arguments(node, build)
            if provider in by_provider
        ),
        invokes=tuple(
            InvokeInfo(ids[node], node.name, node.scope.id, node.place.file, node.place.line)
            for node in resolution.assembly.invokes
        ),
        settings=tuple(
            SettingInfo(
                setting.option.name,
                structs[setting.option.struct].scope.id,
                type_name(setting.option.struct),
                setting.option.type_text,
                show(setting.value),
                setting.origin,
            )
            for setting in settings
        ),
        hooks=tuple(
            HookInfo(
                hook_ids[hook],
                hook.name,
                hook.module,
                ids[hook.owner],
                tuple(hook_ids[need] for need in hook.needs),
            )
            for hook in hooks
        ),
    )


def _arguments(node: Constructor, build: "Build") -> list[tuple[str, Any]]:
    provider: Any = build.providers[node]
    positional = [parameter.name for parameter in node.parameters if parameter.positional]
    if node.kind not in {"provide", "invoke"}:
        return []
    return [*zip(positional, provider.args, strict=True), *provider.kwargs.items()]


def _ids(resolution: Resolution) -> dict[Constructor, str]:
    """Readable and unique: ``agent.ipam/Ipam``, with a number when one module has two of a name."""
    ids: dict[Constructor, str] = {}
    taken: set[str] = set()
    assembly = resolution.assembly
    for node in (*assembly.constructors, *assembly.replaces, *assembly.invokes):
        plain = new = f"{node.scope.id}/{node.name}"
        number = 2
        while new in taken:
            new, number = f"{plain}#{number}", number + 1
        taken.add(new)
        ids[node] = new
    return ids
