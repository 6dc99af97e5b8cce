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
        """Modules as indented text, each with its constructors, invoked functions, hooks and faults.

        Of settings, only the number. With `module`, the full id of one, only that and the modules inside it.
        """
        from lifecycle.graph.render import tree

        return tree(self, module)

    def dot(self) -> str:
        """Graphviz: a cluster for each module, an edge from each constructor to those that it needs."""
        from lifecycle.graph.drawings import dot

        return dot(self)

    def mermaid(self) -> str:
        """Return a Mermaid flowchart: a subgraph for each module, edges from constructors to dependencies."""
        from lifecycle.graph.drawings import mermaid

        return mermaid(self)

    def html(
        self, timeline: "Timeline | None" = None, health: "Mapping[str, tuple[str, str]] | None" = None
    ) -> str:
        """Return one page that needs no network: pan, zoom, search, click.

        With `timeline`, the start as a chart.

        `health` has level (ok, degraded, ...) and message by module or a part of one, and sets its colour.
        """
        from lifecycle.graph.page import page

        return page(self, timeline, health)

    def only(self, module: str) -> "Graph":
        """Return the module of this full id with the modules inside it, and constructors one edge away.

        Raises ValueError if there is no such module.
        """
        from lifecycle.graph.query import only

        return only(self, module)


def read_graph(data: bytes | str) -> Graph:
    """Parse the JSON of Graph.json().

    Raises ValueError("one line") if it is invalid or of another version.
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
    """Return the graph of what was built: edges are read from the providers that ran.

    What is needed but not built because settings are `unset` counts as built.
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
    """Return the graph of a hive that cannot be built, with its faults; `built` marks what would be built."""
    ids = _ids(resolution)
    edges = ((node, need, name) for node in resolution.nodes for name, need in node.needs.items())
    graph = _graph(resolution, ids, set(resolution.order()), edges, settings)
    infos = tuple(
        FaultInfo(
            fault.kind,
            fault.text,
            fault.details,
            tuple(ids[node] for node in fault.concerns if node in ids),  # other nodes belong to inner hives
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
    for scope in resolution.assembly.scopes:  # a duplicate id is a fault: the first represents both
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
    """Numbered by owner, so that the id of a hook does not depend on the hooks of others."""
    counts: dict[Constructor, int] = {}
    hook_ids = {}
    for hook in hooks:
        number = counts[hook.owner] = counts.get(hook.owner, -1) + 1
        hook_ids[hook] = f"{ids[hook.owner]}:{number}"
    return hook_ids


def _injected(node: Constructor) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(type_name, node.injected.values())))


def _ids(resolution: Resolution) -> dict[Constructor, str]:
    """Readable and unique: ``agent.ipam/Ipam``, with a number if a module has two of a name."""
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
    """Return a file of the page, such as ``look.css`` or ``elements.js``, for pages in the same style.

    Raises FileNotFoundError.
    """
    from lifecycle.graph.page import part

    return part(name)
