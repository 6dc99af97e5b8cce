"""The Hubble cell: events of the datapath, the proxies and the agent as flows with names.

Source: perf events and access logs (``Events``), and the agent's tables; a ring stores the last events.
Why:    an event has addresses, identities and ports; operators need pods, services and the policies behind
        a verdict. Unless enable-hubble is true, none of these modules is imported and no event is read.

Settings: enable-hubble, hubble-event-buffer-capacity, hubble-event-queue-size, hubble-monitor-events,
hubble-skip-unknown-cgroup-ids, hubble-redact-*; hubble-socket-path, hubble-listen-address, hubble-tls-*,
hubble-metrics, hubble-dynamic-metrics-config-path, hubble-metrics-server*, hubble-export-*,
hubble-flowlogs-config-path, hubble-drop-events, hubble-drop-events-interval, hubble-drop-events-reasons.
"""

from __future__ import annotations

from cells.hubble.export.drop_events import DropEvents, DropEventSettings
from cells.hubble.export.exporters import Exporters, HubbleExportSettings
from cells.hubble.hubble import (
    AgentNotifications,
    FollowedTables,
    Hubble,
    HubbleSettings,
    KnownNames,
)
from cells.hubble.metrics.server import HubbleMetrics, HubbleMetricsServer, HubbleMetricsSettings
from cells.hubble.rpc.server import HubbleServer, HubbleServerSettings
from lifecycle import config, invoke, module, provide, provide_private

cell = module(
    "hubble",
    "Flows: events with the names of both sides",
    config(HubbleSettings),
    config(HubbleServerSettings),
    config(HubbleMetricsSettings),
    config(HubbleExportSettings),
    config(DropEventSettings),
    provide(Hubble, HubbleServer, HubbleMetrics),
    provide_private(KnownNames, FollowedTables, HubbleMetricsServer, Exporters, DropEvents),
    invoke(Hubble, HubbleServer, HubbleMetrics, HubbleMetricsServer, Exporters, DropEvents),
)

notifications_cell = module(
    "monitor-notifications",
    "What changes in the agent, for clients of the monitor",
    provide_private(FollowedTables, AgentNotifications),
    invoke(AgentNotifications),
)
