"""What load balancers ask a node: whether it has endpoints of a service, and whether it is well.

Reconciler: healthCheckNodePorts of the table ``services`` in, listening ports out; and the port that asks
            after the whole agent, where kube-proxy had it.
Needs:      AgentConfig, Table[ServedFrontend], StatusCollector.   Gives: HealthCheckPorts, HealthzServer.
Source:     core/v1 ServiceSpec.healthCheckNodePort; kube-proxy's service health server.

Settings: enable-health-check-nodeport, kube-proxy-replacement-healthz-bind-address.
"""

from cells.services.health_checks.healthz import HealthzServer
from cells.services.health_checks.ports import HealthCheckPorts
from cells.services.health_checks.settings import HealthCheckSettings
from lifecycle import config, invoke, module, provide

__all__ = ["HealthCheckPorts", "HealthCheckSettings", "HealthzServer", "cell"]

cell = module(
    "service-health-checks",
    "Answers to load balancers",
    config(HealthCheckSettings),
    provide(HealthCheckPorts, HealthzServer),
    invoke(HealthCheckPorts, HealthzServer),
)
