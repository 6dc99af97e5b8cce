"""What a graph is made of: modules, constructors, edges, invoked functions, settings, hooks, faults."""

import msgspec

__all__ = [
    "VERSION",
    "ConstructorInfo",
    "Edge",
    "FaultInfo",
    "HookInfo",
    "InvokeInfo",
    "ModuleInfo",
    "Parts",
    "SettingInfo",
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
    """`source` needs `target`, or only comes after it; both ids. In JSON: from, to."""

    source: str
    target: str
    parameter: str
    """The parameter that is filled with it; empty where nothing is handed over."""
    order: bool = False
    """Whether it only comes after that (see after())."""


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


class FaultInfo(msgspec.Struct, frozen=True):
    """Something wrong with the graph."""

    kind: str
    """missing, private, cycle, duplicate, optional, constructor, invoke, decorate, replace or module."""
    text: str
    details: tuple[str, ...]
    """Where it is and what would help, in lines."""
    nodes: tuple[str, ...]
    """Ids of the constructors and invoked functions it is about; in a cycle each needs the next."""
    lacks: str = ""
    """The type that these need and do not get; of missing and private."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """All there is in the graph of a hive."""

    version: int = VERSION
    name: str
    modules: tuple[ModuleInfo, ...]
    constructors: tuple[ConstructorInfo, ...]
    edges: tuple[Edge, ...]
    invokes: tuple[InvokeInfo, ...]
    settings: tuple[SettingInfo, ...]
    hooks: tuple[HookInfo, ...]
    faults: tuple[FaultInfo, ...] = ()
    """Why the hive cannot be built: then nothing is, and there are no hooks."""

    @property
    def nodes(self) -> "tuple[ConstructorInfo | InvokeInfo, ...]":
        """What an edge may begin or end at."""
        return (*self.constructors, *self.invokes)

    def json(self) -> str:
        """One JSON object: version, name and an array of each kind, by graph_schema()."""
        return msgspec.json.format(msgspec.json.encode(self).decode(), indent=2)
