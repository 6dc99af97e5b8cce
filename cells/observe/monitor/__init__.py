"""The monitor socket: the datapath's packet events for clients on the node.

Edge:   forwards events as they came to every client of ``<state-dir>/monitor1_2.sock``, which decodes them.
Needs:  AgentConfig, Events.   Gives: Monitor; Payloads, which reads what it sends.
Why:    an unmodified ``cilium-dbg monitor`` and ``hive monitor`` watch packets with it. Nothing is read from
        the datapath while nobody is connected.

Settings: enable-monitor.
"""

from cells.config import AgentConfig
from cells.observe.events import Events
from cells.observe.monitor.payload import GobError, Payloads
from cells.observe.monitor.server import SOCKET, Monitor, MonitorSettings
from lifecycle import Lifecycle, Logger, config, invoke, module, provide

__all__ = ["SOCKET", "GobError", "Monitor", "MonitorSettings", "Payloads", "cell"]


def monitor(
    agent: AgentConfig, settings: MonitorSettings, events: Events, lifecycle: Lifecycle, log: Logger
) -> Monitor:
    """The node's monitor socket."""
    return Monitor(agent.state_dir / SOCKET, settings, events, lifecycle, log)


cell = module(
    "monitor",
    "Events of packets on the monitor socket",
    config(MonitorSettings),
    provide(monitor),
    invoke(Monitor),
)
