"""The node agent: all its cells, as one.

Needs: every cell.   Gives: ``agent``, what ``hive agent`` runs and ``hive inspect`` shows.
The order of this list means nothing: what starts before what follows from what each cell needs.
"""

from __future__ import annotations

from cells import (
    api,
    bootstrap,
    cni_config,
    cni_server,
    config,
    config_drift,
    conntrack,
    controllers,
    datapath,
    devices,
    endpoint,
    endpoint_restore,
    events,
    health,
    host_ip_sync,
    ipam,
    maps,
    metrics,
    monitor,
    netlink,
    router,
)
from cells.api import Api, StartedDaemon
from cells.cni_config import CniConfig
from cells.health import AgentReady
from cells.host_ip_sync import HostIPSync
from lifecycle import module, provide


def ready(api_: Api, started: StartedDaemon, written: CniConfig, synced: HostIPSync) -> AgentReady:
    """What a healthy agent does, and so what probes wait for: both sockets serve, the runtime is told."""
    del api_, started, written, synced
    return AgentReady()


agent = module(
    "agent",
    "Node agent: gives pods a network",
    config.cell,
    config_drift.cell,
    netlink.cell,
    maps.cell,
    devices.cell,
    controllers.cell,
    datapath.cell,
    ipam.cell,
    router.cell,
    endpoint.cell,
    endpoint_restore.cell,
    host_ip_sync.cell,
    conntrack.cell,
    events.cell,
    monitor.cell,
    cni_server.cell,
    cni_config.cell,
    api.cell,
    health.cell,
    metrics.cell,
    bootstrap.cell,
    provide(ready),
)
