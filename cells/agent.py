"""The node agent: one module of all its cells.

The order of the cells has no meaning; dependencies determine the start order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from cells import (
    api,
    clustermesh,
    config,
    datapath,
    endpoint,
    kubernetes,
    kvstore,
    maps,
    masquerade,
    netlink,
    tunnel,
    unsupported,
)
from cells import cni as cni_server
from cells import health as cluster_health
from cells import proxy as proxy_statistics
from cells.api import Api, StartedDaemon
from cells.bgp import control as bgp
from cells.cluster import (
    allocation,
    apiservers,
    direct_routes,
    host_ip_sync,
    identity,
    ipcache,
    kubernetes_events,
    node_ids,
    nodes,
    pod_pools,
    prefix_labels,
    remote_nodes,
)
from cells.cluster.host_ip_sync import HostIPSync
from cells.cni import configuration as cni_config
from cells.cni import link_mtu
from cells.cni.configuration import CniConfig
from cells.config import AgentConfig
from cells.config import drift as config_drift
from cells.config import shared as service_settings
from cells.datapath import conntrack
from cells.encryption import wireguard
from cells.encryption.ipsec import reconciler as ipsec
from cells.endpoint import ciliumendpoint, routes
from cells.endpoint import gc as endpoint_gc
from cells.endpoint import host as host_endpoint
from cells.endpoint import restore as endpoint_restore
from cells.endpoint import watchdog as endpoint_watchdog
from cells.hubble import node as hubble
from cells.masquerade import egress_gateway
from cells.node import addresses, big_tcp, devices, ipam, local_addresses, router, sysctl
from cells.observe import bootstrap, controllers, events, health, metrics, monitor, samples
from cells.observe.health import AgentReady
from cells.policy import control as policy_control
from cells.policy import maps as policy_maps
from cells.proxy import dns as dns_proxy
from cells.proxy import envoy
from cells.remote import endpoints, shared
from cells.services import announcements as l2_announcements
from cells.services import control as services
from cells.services import health_checks, node_ports, redirect_skips, sockets
from cells.tunnel.tunnel import Tunnel
from lifecycle import Settings, after, module, provide
from lifecycle import config as settings_of
from lifecycle.admin import AdminSocket, admin


@after(Api, StartedDaemon, CniConfig, HostIPSync, Tunnel)
def ready() -> AgentReady:
    """Report readiness to probes: both sockets serve, and the CNI configuration is written."""
    return AgentReady()


# The shell socket: commands to the running agent, for ``hive shell`` and an unmodified ``cilium-dbg shell``.
#
# Source: Cilium 1.17, pkg/shell. Only root may connect, since commands can stop modules.


class ShellSettings(Settings, frozen=True):
    """Settings of the shell."""

    shell_sock_path: Path | None = Path("shell.sock")
    """Unix socket of the command shell, in the state-dir unless absolute; empty: no shell."""

    shell_history: Annotated[int, Meta(ge=0)] = 0
    """Number of past moments of all tables that the shell can show (db/moments), at most one per second; 0:
    none.
    """


_NOT_STOPPED: Final = {
    "agent.endpoint-restore": ("running pods would not be restored unchanged: restart the agent instead"),
    "agent.router": "routes of running pods would change: restart the agent instead",
}
"""Module -> why the shell must not stop it: stopping would change running pods."""


def shell_socket(agent: AgentConfig, settings: ShellSettings) -> AdminSocket:
    """Return the socket of the shell, which is created once the agent has claimed its node."""
    path = settings.shell_sock_path
    return AdminSocket(
        None if path is None else agent.state_dir / path, keeps=_NOT_STOPPED, history=settings.shell_history
    )


shell = module("shell", "Command shell on shell.sock", settings_of(ShellSettings), admin(shell_socket))


agent = module(
    "agent",
    "Node agent: gives pods a network",
    config.cell,
    config_drift.cell,
    netlink.cell,
    maps.cell,
    maps.watchdog_cell,
    devices.cell,
    big_tcp.cell,
    addresses.cell,
    kubernetes.cell,
    controllers.cell,
    datapath.cell,
    ipam.cell,
    kvstore.cell,
    identity.cell,
    allocation.cell,
    ipcache.cell,
    nodes.cell,
    pod_pools.cell,
    remote_nodes.cell,
    prefix_labels.cell,
    apiservers.cell,
    shared.cell,
    endpoints.cell,
    clustermesh.cell,
    node_ids.cell,
    router.cell,
    direct_routes.cell,
    routes.cell,
    tunnel.cell,
    ipsec.cell,
    masquerade.cell,
    egress_gateway.cell,
    wireguard.cell,
    sysctl.cell,
    policy_maps.cell,
    policy_control.cell,
    host_endpoint.policy_cell,
    service_settings.cell,
    dns_proxy.cell,
    envoy.cell,
    proxy_statistics.cell,
    services.cell,
    sockets.cell,
    node_ports.cell,
    health_checks.cell,
    redirect_skips.cell,
    l2_announcements.cell,
    bgp.cell,
    endpoint.cell,
    host_endpoint.cell,
    endpoint_restore.cell,
    ciliumendpoint.cell,
    endpoint_gc.cell,
    endpoint_watchdog.cell,
    host_ip_sync.cell,
    local_addresses.cell,
    conntrack.cell,
    events.cell,
    monitor.cell,
    kubernetes_events.cell,
    cluster_health.cell,
    hubble.cell,
    hubble.notifications_cell,
    cni_server.cell,
    cni_config.cell,
    link_mtu.cell,
    api.cell,
    health.cell,
    metrics.cell,
    samples.cell,
    bootstrap.cell,
    shell,
    unsupported.cell,
    provide(ready),
)
