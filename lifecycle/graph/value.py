"""The graph as a value: modules, constructors, dependencies, settings and hooks."""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from lifecycle.errors import Fault
from lifecycle.graph.parts import (
    VERSION,
    ConstructorInfo,
    Edge,
    FaultInfo,
    HookInfo,
    InvokeInfo,
    ModuleInfo,
    Parts,
    SettingInfo,
)
from lifecycle.hints.keys import type_name
from lifecycle.injection.constructors import Constructor
from lifecycle.injection.resolve import Resolution
from lifecycle.settings.sources import Setting
from lifecycle.settings.values import show

if TYPE_CHECKING:
    from lifecycle.graph.timeline import Timeline
    from lifecycle.hooks.nodes import HookNode
    from lifecycle.injection.build import Build

__all__ = ["Graph", "faulty_graph", "graph_of", "read_graph"]


class Graph(Parts, frozen=True, kw_only=True):
    """The graph of a hive."""

    def tree(self, module: str | None = None) -> str:
        """Modules as an indented text, with what each provides, invokes and runs, and what is wrong with it.

        Of settings only how many there are. With `module`, the full id of one: it and those below.
        """
        from lifecycle.graph.render import tree

        return tree(self, module)

    def dot(self) -> str:
        """Graphviz: a cluster per module, an arrow from who needs to what is needed."""
        from lifecycle.graph.drawings import dot

        return dot(self)

    def mermaid(self) -> str:
        """A Mermaid flowchart: a subgraph per module, an arrow from who needs to what is needed."""
        from lifecycle.graph.drawings import mermaid

        return mermaid(self)

    def html(
        self, timeline: "Timeline | None" = None, health: "Mapping[str, tuple[str, str]] | None" = None
    ) -> str:
        """One page that needs no network: pan, zoom, search, click; with `timeline`, the start as a chart.

        `health` has level (ok, degraded, ...) and message by module, or by a part of one: its colour.
        """
        from lifecycle.graph.page import page

        return page(self, timeline, health)

    def only(self, module: str) -> "Graph":
        """The module of this full id and those below it, with the constructors directly around them.

        Raises ValueError when there is none.
        """
        from lifecycle.graph.query import only

        return only(self, module)


def read_graph(data: bytes | str) -> Graph:
    """The graph that Graph.json() wrote.

    Raises ValueError("one line") when it is none, or of another version.
    """
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise ValueError(
                f"it is of version {version} of the graph's JSON; this hive reads version {VERSION}"
            )
        return msgspec.json.decode(data, type=Graph)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not a graph ({error}): expected the output of --format json") from None


class _Versioned(msgspec.Struct):
    version: int


def graph_of(
    resolution: Resolution,
    build: "Build",
    hooks: "list[HookNode]",
    settings: list[Setting],
    unset: Collection[Constructor] = (),
) -> Graph:
    """The graph of what was built: edges are read from the very providers that ran.

    What is needed, and not built because settings are `unset`, counts as built.
    """
    ids = _ids(resolution)
    hook_ids = _hook_ids(hooks, ids)
    edges = ((node, need, name) for node in resolution.nodes for name, need in build.arguments(node))
    graph = _graph(resolution, ids, {*build.instances, *unset}, edges, settings)
    infos = tuple(
        HookInfo(
            hook_ids[hook],
            hook.name,
            hook.module,
            ids[hook.owner],
            tuple(hook_ids[need] for need in hook.needs),
            *hook.limits,
        )
        for hook in hooks
    )
    return msgspec.structs.replace(graph, hooks=infos)


def faulty_graph(resolution: Resolution, faults: Iterable[Fault], settings: list[Setting]) -> Graph:
    """The graph of what cannot be built, with its faults; `built` is what would be."""
    ids = _ids(resolution)
    edges = ((node, need, name) for node in resolution.nodes for name, need in node.needs.items())
    graph = _graph(resolution, ids, set(resolution.order()), edges, settings)
    infos = tuple(
        FaultInfo(
            fault.kind,
            fault.text,
            fault.details,
            tuple(ids[node] for node in fault.concerns if node in ids),  # others are of hives inside this one
            fault.lacks,
        )
        for fault in faults
    )
    return msgspec.structs.replace(graph, faults=infos)


def _graph(
    resolution: Resolution,
    ids: Mapping[Constructor, str],
    built: Container[Constructor],
    edges: Iterable[tuple[Constructor, Constructor, str]],
    settings: list[Setting],
) -> Graph:
    modules = {(node.call, node.prefix): node.scope.id for node in resolution.active if node.kind == "config"}
    infos: dict[str, ModuleInfo] = {}
    for scope in resolution.assembly.scopes:  # two of one id are a fault: the first stands for both
        parent = scope.parent.id if scope.parent else None
        infos.setdefault(scope.id, ModuleInfo(scope.id, scope.title, parent))
    return Graph(
        name=resolution.assembly.root.id,
        modules=tuple(infos.values()),
        constructors=tuple(
            ConstructorInfo(
                ids[node],
                node.name,
                node.kind,
                node.scope.id,
                node.provides,
                node.private,
                node in built,
                node.replaced,
                node.place.file,
                node.place.line,
                _injected(node),
            )
            for node in resolution.assembly.providers
        ),
        edges=tuple(
            Edge(ids[node], ids[need], "", order=True)
            if name in node.orders
            else Edge(ids[node], ids[need], name)
            for node, need, name in edges
        ),
        invokes=tuple(
            InvokeInfo(ids[node], node.name, node.scope.id, node.place.file, node.place.line, _injected(node))
            for node in resolution.assembly.invokes
        ),
        settings=tuple(
            SettingInfo(
                setting.option.name,
                modules[setting.option.struct, setting.option.prefix],
                type_name(setting.option.struct),
                setting.option.type_text,
                show(setting.value),
                setting.origin,
                setting.option.help,
            )
            for setting in settings
        ),
        hooks=(),
    )


def _hook_ids(hooks: "list[HookNode]", ids: dict[Constructor, str]) -> dict["HookNode", str]:
    """Numbered by owner, so that a hook keeps its id whatever others register."""
    counts: dict[Constructor, int] = {}
    found = {}
    for hook in hooks:
        number = counts[hook.owner] = counts.get(hook.owner, -1) + 1
        found[hook] = f"{ids[hook.owner]}:{number}"
    return found


def _injected(node: Constructor) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(type_name, node.injected.values())))


def _ids(resolution: Resolution) -> dict[Constructor, str]:
    """Readable and unique: ``agent.ipam/Ipam``, with a number when one module has two of a name."""
    ids: dict[Constructor, str] = {}
    taken: set[str] = set()
    assembly = resolution.assembly
    for node in (*assembly.providers, *assembly.invokes):
        plain = new = f"{node.scope.id}/{node.name}"
        number = 2
        while new in taken:
            new, number = f"{plain}#{number}", number + 1
        taken.add(new)
        ids[node] = new
    return ids


def page_part(name: str) -> str:
    """A file of the page of a graph, such as ``look.css`` or ``elements.js``, for pages that look alike.

    Raises FileNotFoundError.
    """
    from lifecycle.graph.page import part

    return part(name)
