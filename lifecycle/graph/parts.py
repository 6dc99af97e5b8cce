"""The parts of a graph: modules, constructors, edges, invoked functions, settings, hooks, faults."""

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
"""Version of the JSON form; increased when a field changes its meaning or is removed."""


class ModuleInfo(msgspec.Struct, frozen=True):
    """A module; the hive itself is the one without a parent."""

    id: str
    title: str
    parent: str | None


class ConstructorInfo(msgspec.Struct, frozen=True):
    """A provider of a type."""

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
    """What the hive itself passes to it: Lifecycle, Logger, ..."""


class InvokeInfo(msgspec.Struct, frozen=True):
    """A function that is invoked."""

    id: str
    name: str
    module: str
    file: str
    line: int
    injected: tuple[str, ...] = ()


class Edge(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
    """`source` needs `target`, or is only ordered after it; both are ids. In JSON: from, to."""

    source: str
    target: str
    parameter: str
    """The parameter that receives it; empty if nothing is passed."""
    order: bool = False
    """Whether it is only ordered after that (see after())."""


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
    """Ids of the hooks for which it waits."""
    start_timeout: float | None = None
    """Its start timeout, in seconds."""
    stop_timeout: float | None = None


class FaultInfo(msgspec.Struct, frozen=True):
    """A fault of the graph."""

    kind: str
    """missing, private, cycle, duplicate, optional, constructor, invoke, decorate, replace or module."""
    text: str
    details: tuple[str, ...]
    """The place and a suggestion, in lines."""
    nodes: tuple[str, ...]
    """Ids of the constructors and invoked functions concerned; in a cycle each needs the next."""
    lacks: str = ""
    """For missing and private: the type that they need and do not get."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of the graph of a hive."""

    version: int = VERSION
    name: str
    modules: tuple[ModuleInfo, ...]
    constructors: tuple[ConstructorInfo, ...]
    edges: tuple[Edge, ...]
    invokes: tuple[InvokeInfo, ...]
    settings: tuple[SettingInfo, ...]
    hooks: tuple[HookInfo, ...]
    faults: tuple[FaultInfo, ...] = ()
    """Why the hive cannot be built; then nothing is built, and there are no hooks."""

    @property
    def nodes(self) -> "tuple[ConstructorInfo | InvokeInfo, ...]":
        """The possible ends of edges."""
        return (*self.constructors, *self.invokes)

    def json(self) -> str:
        """Return one JSON object: version, name and an array for each kind, as graph_schema() describes."""
        return msgspec.json.format(msgspec.json.encode(self).decode(), indent=2)
