"""The operator's two ports: health and state on 9234, metrics for Prometheus on 9963.

Edge:   asks the API server how it is when a probe comes; tells metrics when somebody scrapes.
Needs:  ServerSettings, ClusterAPI, Leadership, Metrics, HealthTree.   Gives: OperatorServer.
"""

from cells.observe.metrics import Metrics, MetricsSettings, Program
from cells.operator.server.server import OperatorServer, ServerSettings
from lifecycle import after, config, group, invoke, module, provide, supply

__all__ = ["Metrics", "OperatorServer", "ServerSettings", "cell"]


def usual_metrics() -> MetricsSettings:
    """Which metrics are told: all. Where is this cell's setting, not the agent's."""
    return MetricsSettings()


@after(OperatorServer)
def serve() -> None:
    """Have it serve."""


cell = group(
    module(
        "metrics",
        "Metrics of the operator",
        provide(usual_metrics, Metrics),
        supply(Program("cilium_operator")),
    ),
    module(
        "server",
        "Health, state and metrics of the operator",
        config(ServerSettings),
        provide(OperatorServer),
        invoke(serve),
    ),
)
