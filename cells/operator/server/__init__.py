"""The operator's two ports: health and state on 9234, metrics for Prometheus on 9963.

Edge:   asks the API server how it is when a probe comes; tells metrics when somebody scrapes.
Needs:  ServerSettings, ClusterAPI, Leadership, Metrics, HealthTree.   Gives: OperatorServer.
"""

from cells.observe.metrics import Metrics, MetricsSettings, Program
from cells.operator.server.server import OperatorServer, ServerSettings
from lifecycle import after, config, invoke, module, provide, supply

__all__ = ["Metrics", "OperatorServer", "ServerSettings", "cell"]


def usual_metrics() -> MetricsSettings:
    """Which metrics are told: all. Where is this cell's setting, not the agent's."""
    return MetricsSettings()


@after(OperatorServer)
def serve() -> None:
    """Have it serve."""


cell = module(
    "server",
    "Health, state and metrics of the operator",
    config(ServerSettings),
    provide(usual_metrics, Metrics, OperatorServer),
    supply(Program("cilium_operator")),
    invoke(serve),
)
