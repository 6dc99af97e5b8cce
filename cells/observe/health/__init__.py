"""Tells whether the agent is well: one verdict, and the port the kubelet probes.

Controller: reads the hive's health tree, gives the verdict that the REST API and the port share.
Needs:  AgentConfig, HealthTree, Controllers, Probe and Dependency members, AgentReady (from the composition),
        HealthServerSettings.
Gives:  StatusCollector, AgentStatus, Probe, Dependency; listens on loopback, ``agent-health-port`` (9879).
Why:    the port listens only once everything serves, so that a probe before that is refused.
"""

from cells.observe.health.node_probes import maps_probe, state_probe
from cells.observe.health.probes import Probe, Probes
from cells.observe.health.server import AgentReady, HealthServer, HealthServerSettings
from cells.observe.health.status import (
    AgentStatus,
    Dependency,
    State,
    StatusCollector,
    agent_status,
    agent_version,
)
from lifecycle import config, invoke, module, provide

__all__ = [
    "AgentReady",
    "AgentStatus",
    "Dependency",
    "HealthServer",
    "HealthServerSettings",
    "Probe",
    "Probes",
    "State",
    "StatusCollector",
    "agent_status",
    "agent_version",
    "cell",
]

cell = module(
    "health",
    "The agent's status, and the port that probes ask",
    config(HealthServerSettings),
    provide(maps_probe, state_probe, Probes, StatusCollector, HealthServer),
    invoke(HealthServer),
)
