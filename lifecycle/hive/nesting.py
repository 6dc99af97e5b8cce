"""The interface between a hive and its inner hives."""

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
    """The scope of an inner hive, and the values it inherits from the outer hive."""

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
    """The faults and settings of an inner hive, which the outer hive checks."""

    faults: list[Fault]
    groups: list[tuple[Scope, Group]]
    """Its settings structs, each with its module."""


class Plan(Protocol):
    """How to create an inner hive."""

    def findings(self, nesting: Nesting) -> Findings:
        """Return its faults and settings."""
        ...


class Holder(ABC):
    """An object with an inner hive."""

    @abstractmethod
    def graph(self) -> "Graph":
        """Return the graph of the inner hive, whether it runs or not."""

    @abstractmethod
    def built(self) -> list[object]:
        """Return the instances in the running hive."""


def plan_of(call: object) -> Plan | None:
    """Return the plan of a constructor from nest(), or None."""
    return getattr(call, PLAN, None)
