"""How the agent is, in one value: what GET /healthz on the socket and port 9879 both tell.

Needs: HealthTree, Controllers, Probes, Dependency members.
Gives: AgentStatus, agent_status (pure), StatusCollector, Dependency.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

from cells.observe.controllers import Controllers, ControllerStatus
from cells.observe.health.probes import Probes
from lifecycle import HealthStatus, HealthTree, Member

State = Literal["Ok", "Warning", "Failure", "Disabled"]

WELL: Final[frozenset[State]] = frozenset({"Ok", "Disabled"})

CNI_CONFIG_MODULE = "cni-config"
"""Id of the module whose failure means that pods cannot be made here. Its jobs, below it, only watch."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """Something outside the agent whose failure makes the agent's status a failure."""

    title: str
    """As the status names it."""
    state: Callable[[], tuple[State, str]]
    """How it is, and what is wrong."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The verdict over the agent, and what it rests on."""

    state: State
    message: str
    """What is wrong, empty when nothing is."""
    modules: tuple[HealthStatus, ...]
    """Health of every module, in the order of the tree."""
    cni_config: HealthStatus | None
    """What the writer of the CNI configuration file said; None when there is none, or it has said nothing."""
    controllers: tuple[ControllerStatus, ...] = ()
    """By name."""
    stale: Mapping[str, float] = field(default_factory=dict)
    """Probes that do not answer, and since when (Unix seconds)."""
    outside: bool = False
    """Whether only something outside of the agent has failed."""

    @property
    def serves(self) -> bool:
        """Whether a probe should succeed: state Ok or Disabled, or what failed no restart would mend."""
        return self.state in WELL or self.outside

    @property
    def degraded(self) -> tuple[HealthStatus, ...]:
        """The modules that report trouble."""
        return tuple(module for module in self.modules if module.level == "degraded")

    @property
    def uncontrolled(self) -> tuple[HealthStatus, ...]:
        """Degraded modules whose trouble is not shown by a controller."""
        told = {controller.name for controller in self.controllers}
        return tuple(
            module
            for module in self.degraded
            if module.module not in told and module.module.rpartition(".")[2] not in told
        )


def agent_status(
    modules: Iterable[HealthStatus],
    controllers: tuple[ControllerStatus, ...] = (),
    stale: Mapping[str, float] | None = None,
    dependencies: Iterable[Dependency] = (),
) -> AgentStatus:
    """The verdict over these modules, and what the agent depends on.

    The first reason counts, in Cilium's order: a probe that does not answer, for then nothing is sure; the
    key-value store; a CNI configuration that cannot be written, since the node then gets no pods. Any other
    degraded module is listed, but restarting the agent would not help: the state stays Ok.
    """
    told = tuple(modules)
    cni = [module for module in told if module.module.rpartition(".")[2] == CNI_CONFIG_MODULE]
    failed = next((module for module in cni if module.level == "degraded"), None)
    spoken = failed or next((module for module in cni if module.level != "unknown"), None)
    unready = next(
        ((one.title, *found) for one in dependencies if (found := one.state())[0] not in WELL), None
    )
    state: State = "Ok"
    message = ""
    if stale:
        state, message = "Warning", "Stale status data"
    elif unready is not None:
        title, state, why = unready
        message = f"{title} is not ready: {why}"
    elif failed is not None:
        state, message = "Failure", f"Could not write CNI config file: {failed.message or failed.error}"
    outside = unready is not None and not stale and failed is None
    return AgentStatus(state, message, told, spoken, controllers, dict(stale or {}), outside)


class StatusCollector:
    """Gives the agent's status at any time; nothing is cached, since all of it is in memory."""

    def __init__(
        self,
        health: HealthTree,
        controllers: Controllers,
        probes: Probes,
        dependencies: list[Member[Dependency]],
    ) -> None:
        self._health = health
        self._controllers = controllers
        self._probes = probes
        self._dependencies = dependencies

    def status(self) -> AgentStatus:
        """The agent's status now."""
        stale, modules = self._probes.stale, self._health.snapshot()
        return agent_status(modules, self._controllers.all(), stale, self._dependencies)


@cache
def agent_version() -> str:
    """Version of the installed agent, ``0.0.0`` when it runs from an uninstalled tree.

    By the name of the package's .dist-info: importlib.metadata takes 20 ms and 2 MB to import.
    """
    for folder in sys.path:
        for found in Path(folder).glob("hive_agent-*.dist-info"):
            return found.stem.removeprefix("hive_agent-")
    return "0.0.0"
