"""What a hive and one inside it know of each other."""

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
"""The attribute of a constructor of an inner hive that holds what it is made of."""


class Nesting(NamedTuple):
    """Where an inner hive stands: its scope, and what it takes over from the hive around it."""

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
    """The settings as a new start would load them."""


class Findings(NamedTuple):
    """What the outer hive has to check for one inside it."""

    faults: list[Fault]
    groups: list[tuple[Scope, Group]]
    """Its structs of settings, each with its module."""


class Plan(Protocol):
    """What an inner hive is made of, before there is one."""

    def findings(self, nesting: Nesting) -> Findings:
        """Its faults and settings, were it built there."""
        ...


class Holder(ABC):
    """Something built that holds an inner hive."""

    @abstractmethod
    def graph(self) -> "Graph":
        """The graph of the inner hive, whether it runs or not."""

    @abstractmethod
    def built(self) -> list[object]:
        """What is built in it, while it runs."""


def plan_of(call: object) -> Plan | None:
    """The plan behind a constructor that nest() has made."""
    return getattr(call, PLAN, None)
