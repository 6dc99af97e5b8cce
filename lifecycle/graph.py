"""The graph as a value: what there is, who needs whom, what it sets and what it runs.

Needs:  a built resolution.
Gives:  Graph with tree(), dot(), mermaid(), json(), html(), only(); graph_of() makes it, read_graph() reads
        it from JSON.
"""

from typing import TYPE_CHECKING

import msgspec

from lifecycle.constructors import Constructor
from lifecycle.keys import type_name
from lifecycle.resolve import Resolution
from lifecycle.sources import Setting
from lifecycle.values import show

if TYPE_CHECKING:
    from lifecycle.build import Build
    from lifecycle.graph_timeline import Timeline
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
    "read_graph",
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
    """provide, part (one of several results), supply, config, decorate or replace."""
    module: str
    provides: str
    private: bool
    built: bool
    """Whether something invoked needs it."""
    replaced: bool
    file: str
    line: int
    injected: tuple[str, ...] = ()
    """What the hive itself gives it: Lifecycle, Logger, ..."""


class InvokeInfo(msgspec.Struct, frozen=True):
    """A function that is invoked."""

    id: str
    name: str
    module: str
    file: str
    line: int
    injected: tuple[str, ...] = ()


class Edge(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
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
    help: str = ""


class HookInfo(msgspec.Struct, frozen=True):
    """A hook, in starting order."""

    id: str
    name: str
    module: str
    constructor: str
    """Id of the constructor or invoked function that registered it."""
    after: tuple[str, ...]
    """Ids of the hooks it waits for."""
    start_timeout: float | None = None
    """Seconds it may take."""
    stop_timeout: float | None = None


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """The graph of a hive."""

    version: int = VERSION
    name: str
    modules: tuple[ModuleInfo, ...]
    constructors: tuple[ConstructorInfo, ...]
    edges: tuple[Edge, ...]
    invokes: tuple[InvokeInfo, ...]
    settings: tuple[SettingInfo, ...]
    hooks: tuple[HookInfo, ...]

    @property
    def nodes(self) -> "tuple[ConstructorInfo | InvokeInfo, ...]":
        """What an edge may begin or end at."""
        return (*self.constructors, *self.invokes)

    def json(self) -> str:
        """One JSON object: version, name and an array of each kind. docs/graph-schema.json describes it."""
        return msgspec.json.format(msgspec.json.encode(self).decode(), indent=2)

    def tree(self, module: str | None = None) -> str:
        """Modules as an indented text, with what each provides, sets, invokes and runs.

        With `module`, the full id of one: it and those below.
        """
        from lifecycle.render import tree

        return tree(self, module)

    def dot(self) -> str:
        """Graphviz: a cluster per module, an arrow from who needs to what is needed."""
        from lifecycle.render import dot

        return dot(self)

    def mermaid(self) -> str:
        """A Mermaid flowchart: a subgraph per module, an arrow from who needs to what is needed."""
        from lifecycle.render import mermaid

        return mermaid(self)

    def html(self, timeline: "Timeline | None" = None) -> str:
        """One page that needs no network: pan, zoom, search, click; with `timeline`, the start as a chart."""
        from lifecycle.graph_page import page

        return page(self, timeline)

    def only(self, module: str) -> "Graph":
        """The module of this full id and those below it, with the constructors directly around them.

        Raises ValueError when there is none.
        """
        from lifecycle.graph_query import only

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
        raise ValueError(f"it is no graph ({error}): expected the output of --format json") from None


class _Versioned(msgspec.Struct):
    version: int


def graph_of(
    resolution: Resolution, build: "Build", hooks: "list[HookNode]", settings: list[Setting]
) -> Graph:
    """The graph of what was built: edges are read from the very providers that ran."""
    ids = _ids(resolution)
    hook_ids = _hook_ids(hooks, ids)
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
                node.provides,
                node.private,
                node in build.instances,
                node.replaced,
                node.place.file,
                node.place.line,
                _injected(node),
            )
            for node in resolution.assembly.providers
        ),
        edges=tuple(
            Edge(ids[node], ids[need], name)
            for node in resolution.nodes
            for name, need in build.arguments(node)
        ),
        invokes=tuple(
            InvokeInfo(ids[node], node.name, node.scope.id, node.place.file, node.place.line, _injected(node))
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
                setting.option.help,
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
                *hook.limits,
            )
            for hook in hooks
        ),
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
