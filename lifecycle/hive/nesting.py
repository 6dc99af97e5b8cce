"""The interface between a hive and a hive inside it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lifecycle.errors import Fault
from lifecycle.hooks.events import Events
from lifecycle.injection.constructors import Scope
from lifecycle.injection.profile import Profile
from lifecycle.jobs.metrics import JobMetrics
from lifecycle.process.health import HealthTree
from lifecycle.process.logs import Logger
from lifecycle.settings.options import Group
from lifecycle.settings.sources import Loaded

if TYPE_CHECKING:
    from lifecycle.graph.value import Graph

__all__ = ["PLAN", "Findings", "Holder", "Nesting", "plan_of"]

PLAN = "__lifecycle_plan__"
"""The attribute of an inner hive's constructor that holds its plan."""


class Nesting(NamedTuple):
    """The scope of an inner hive, and what it takes over from the outer hive."""

    scope: Scope
    limits: tuple[float, float]
    """Seconds a hook may take to start and to stop."""
    stop_budget: float
    log: Logger | None
    sequential: bool
    profile: Profile
    health: HealthTree
    jobs: JobMetrics
    events: Events
    loaded: Callable[[], Loaded]
    """The settings in force."""
    load: Callable[[Sequence[Path]], Loaded]
    """Load the settings as a new start would."""


class Findings(NamedTuple):
    """What the outer hive checks for an inner hive."""

    faults: list[Fault]
    groups: list[tuple[Scope, Group]]
    """Its settings structs, each with its module."""


class Plan(Protocol):
    """How an inner hive is made."""

    def findings(self, nesting: Nesting) -> Findings:
        """Faults and settings that it would have there."""
        ...


class Holder(ABC):
    """An instance that holds an inner hive."""

    @abstractmethod
    def graph(self) -> "Graph":
        """The graph of the inner hive, whether it runs or not."""

    @abstractmethod
    def built(self) -> list[object]:
        """The instances that are built in it, while it runs."""


def plan_of(call: object) -> Plan | None:
    """The plan of a constructor that nest() has made."""
    return getattr(call, PLAN, None)
