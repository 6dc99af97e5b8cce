"""How the agent is, in one value: what GET /healthz on the socket and port 9879 both tell.

Needs: HealthTree, Controllers, Probes.   Gives: AgentStatus, agent_status (pure), StatusCollector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from cells.observe.controllers import Controllers, ControllerStatus
from cells.observe.health.probes import Probes
from lifecycle import HealthStatus, HealthTree

State = Literal["Ok", "Warning", "Failure", "Disabled"]

CNI_CONFIG_MODULE = "cni-config"
"""Id of the module whose failure means that pods cannot be made here. Its jobs, below it, only watch."""


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

    @property
    def serves(self) -> bool:
        """Whether a probe should succeed: state Ok or Disabled."""
        return self.state in ("Ok", "Disabled")

    @property
    def degraded(self) -> tuple[HealthStatus, ...]:
        """The modules that report trouble."""
        return tuple(module for module in self.modules if module.level == "degraded")

    @property
    def uncontrolled(self) -> tuple[HealthStatus, ...]:
        """The modules that report trouble no controller tells of."""
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
) -> AgentStatus:
    """The verdict over these modules.

    While a probe does not answer nothing is sure: the first reason to warn. A CNI configuration that cannot
    be written fails the agent, since the node then gets no pods. Any other degraded module is told, but
    restarting the agent would not mend it: the state stays Ok (Cilium's order of reasons; there is no
    key-value store and no Kubernetes yet that could fail).
    """
    told = tuple(modules)
    cni = [module for module in told if module.module.rpartition(".")[2] == CNI_CONFIG_MODULE]
    failed = next((module for module in cni if module.level == "degraded"), None)
    spoken = failed or next((module for module in cni if module.level != "unknown"), None)
    state: State = "Ok"
    message = ""
    if stale:
        state, message = "Warning", "Stale status data"
    elif failed is not None:
        state, message = "Failure", f"Could not write CNI config file: {failed.message or failed.error}"
    return AgentStatus(state, message, told, spoken, controllers, dict(stale or {}))


class StatusCollector:
    """Gives the agent's status at any time; nothing is cached, since all of it is in memory."""

    def __init__(self, health: HealthTree, controllers: Controllers, probes: Probes) -> None:
        self._health = health
        self._controllers = controllers
        self._probes = probes

    def status(self) -> AgentStatus:
        """The agent's status now."""
        return agent_status(self._health.snapshot(), self._controllers.all(), self._probes.stale)


@cache
def agent_version() -> str:
    """Version of the installed agent, ``0.0.0`` when it runs from an uninstalled tree."""
    from importlib import metadata  # 20 ms of imports, which the agent's start does not wait for

    try:
        return metadata.version("hive-agent")
    except metadata.PackageNotFoundError:
        return "0.0.0"
