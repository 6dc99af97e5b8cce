"""The check of a hive: as one line for people, as JSON for programs."""

import msgspec

from lifecycle.errors import GraphError, HiveError, SettingsError, UsageError
from lifecycle.graph.parts import FaultInfo
from lifecycle.hive.hive import Hive

__all__ = ["Verdict", "check_all", "check_graph", "faulty"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check."""

    name: str
    """Of the hive."""
    sound: bool
    whole: bool = True
    """Whether settings and constructors were checked in addition to the wiring."""
    constructors: int = 0
    """Number of constructors that are needed."""
    hooks: int = 0
    settings: int = 0
    """Number of settings that flags, variables or files set."""
    faults: tuple[FaultInfo, ...] = ()
    """With the kinds of a graph's faults, or setting, usage or failure."""

    def __str__(self) -> str:
        hooks = f", {self.hooks} hooks, {self.settings} settings given" if self.whole else ""
        return f"{self.name} is sound: {self.constructors} constructors{hooks}"

    def json(self) -> str:
        """Return one JSON object."""
        return msgspec.json.format(msgspec.json.encode(self).decode(), indent=2)


def check_graph(hive: Hive) -> Verdict:
    """Check the wiring alone: reads no settings, builds nothing. Raises GraphError with every fault."""
    hive.options()
    return Verdict(name=hive.name, sound=True, whole=False, constructors=hive.needed)


def check_all(hive: Hive) -> Verdict:
    """Check the wiring and the settings, and build everything, as constructors may fail, too.

    Raises what Hive.check() raises, BuildError.
    """
    hive.check()
    graph = hive.graph()
    return Verdict(
        name=hive.name,
        sound=True,
        constructors=sum(node.built for node in graph.constructors),
        hooks=len(graph.hooks),
        settings=sum(setting.origin != "default" for setting in graph.settings),
    )


def faulty(hive: Hive, error: HiveError) -> Verdict:
    """Return the verdict from the error of a check."""
    faults: tuple[FaultInfo, ...]
    if isinstance(error, SettingsError):
        faults = tuple(
            FaultInfo(fault.kind, fault.text, fault.details, (), fault.lacks) for fault in error.faults
        )
    elif isinstance(error, GraphError):
        faults = hive.graph(faulty=True).faults
    else:
        kind = "usage" if isinstance(error, UsageError) else "failure"
        faults = (FaultInfo(kind, str(error), (), ()),)
    return Verdict(name=hive.name, sound=False, faults=faults)
