"""Node information for the API, read from the cells on each request.

Needs: AgentConfig, Table[Device], PodMtu, Ipam, Router, Datapath, NodeAddresses,
Maps, ReadTable[ClusterNode]; KubernetesAPI, where there is one.   Gives: NodeView.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from operator import attrgetter

from cells.api.models import status as wire
from cells.api.operations.node.cluster_nodes import node_element
from cells.api.operations.node.config_mapping import NodeFacts
from cells.api.operations.status.mapping import NOTHING_SERVED, ServiceFacts, StatusFacts
from cells.cluster.kvstore import KVStore
from cells.cluster.nodes import ClusterNode
from cells.config import AgentConfig
from cells.datapath import Datapath, MonitorNotifications
from cells.ipam import Ipam
from cells.kubernetes import KubernetesAPI
from cells.maps import NODE_AUDITS_POLICY, Maps, MapSettings
from cells.node.addresses import NodeAddresses
from cells.node.devices import Device, PodMtu, uplinks
from cells.node.router import Router
from cells.observe.events import EventsSettings
from cells.observe.health import agent_version
from cells.observe.monitor import MonitorSettings
from cells.tunnel import RouteMtu, TunnelSettings
from lifecycle import ReadTable, Table, log_level, set_log_level


class NodeView:
    """Reads node information from the cells. Nothing is cached, so nothing gets stale."""

    def __init__(
        self,
        config: AgentConfig,
        devices: Table[Device],
        mtu: PodMtu,
        ipam: Ipam,
        router: Router,
        datapath: Datapath,
        addresses: NodeAddresses,
        nodes: ReadTable[ClusterNode],
        *,
        maps: Maps,
        map_settings: MapSettings,
        monitor: Callable[[], wire.MonitorStatus | None],
        chaining: str,
        route_mtu_in_chains: bool,
        route_mtu: RouteMtu,
        tunnel: TunnelSettings,
        kubernetes: KubernetesAPI | None = None,
        kvstore: KVStore | None = None,
        masquerading: Callable[[], wire.Masquerading] = wire.Masquerading,
        services: Callable[[], ServiceFacts] | None = None,
        proxy: Callable[[], wire.ProxyStatus | None] = lambda: None,
        host_firewall: bool = False,
    ) -> None:
        self._config = config
        self._devices = devices
        self._mtu = mtu
        self._ipam = ipam
        self._router = router
        self._datapath = datapath
        self._addresses = addresses
        self._nodes = nodes.map(node_element, name="node-elements")
        self._maps = maps
        self._map_settings = map_settings
        self._monitor = monitor
        self._chaining = chaining
        self._route_mtu_in_chains = route_mtu_in_chains
        self._route_mtu = route_mtu
        self._tunnel = tunnel
        self._kubernetes = kubernetes
        self._kvstore = kvstore
        self._masquerading = masquerading
        self._services = services
        self._proxy = proxy
        self._host_firewall = host_firewall

    def node(self) -> NodeFacts:
        """Routers, pod CIDRs and MTU."""
        return NodeFacts(
            addressing=self._router.addressing(),
            mtu=self._mtu(),
            route_mtu=self._route_mtu(),
            tunnel_protocol=self._tunnel.tunnel_protocol if self._tunnel.tunnelled else "",
            ipam_mode=self._ipam.mode,
            notifications=self._datapath.notifications,
            debug=log_level() == "debug",
            chaining=self._chaining,
            route_mtu_in_chains=self._route_mtu_in_chains,
            kvstore=self._kvstore.settings.kvstore if self._kvstore is not None else "",
            kvstore_options=self._kvstore.settings.kvstore_opt if self._kvstore is not None else {},
        )

    def audited(self) -> bool:
        """Whether the node's policy drops nothing and only tells what it would drop."""
        return bool(self._datapath.notifications.flags & NODE_AUDITS_POLICY)

    def set_notifications(self, notifications: MonitorNotifications) -> None:
        """Have the datapath tell this of packets from now on; nothing happens when it does already."""
        if notifications != self._datapath.notifications:
            self._datapath.set_notifications(notifications)

    def log_debug(self, on: bool) -> None:
        """Log what helps to find a fault, or no longer; the plugin's log is the setting's alone."""
        if on != (log_level() == "debug"):
            set_log_level("debug" if on else "info")

    def settings(self) -> Mapping[str, object]:
        """The daemon's configuration under the names ``cilium-dbg config`` shows."""
        config = self._config
        return {
            "BPFRoot": str(config.bpf_root),
            "ClusterName": config.cluster_name,
            "DatapathMode": "veth",
            "EnableIPv4": config.ipv4,
            "EnableIPv6": config.ipv6,
            "IPAM": self._ipam.mode,
            "MTU": config.mtu,
            "RoutingMode": self._tunnel.routing_mode,
            "SocketPath": str(config.api_socket),
            "StateDir": str(config.state),
        }

    def version(self) -> tuple[str, str]:
        """The agent's version, and the digest of its datapath."""
        return agent_version(), self._datapath.build

    def status(self) -> StatusFacts:
        """What GET /healthz tells besides the verdict."""
        version, revision = self.version()
        return StatusFacts(
            version=version,
            revision=revision,
            cluster_name=self._config.cluster_name,
            node_name=self._config.node_name,
            node=self.node(),
            node_ips=self._addresses.all(),
            nodes=sorted(self._nodes.all(), key=attrgetter("name")),
            uplinks={
                device.name: tuple(str(address.ip) for address in device.addresses)
                for device in uplinks(self._devices.all())
            },
            ipam_status=self._ipam.status(),
            allocations=self._ipam.dump(),
            map_sizes=map_sizes(self._maps),
            map_size_ratio=self._map_settings.bpf_map_dynamic_size_ratio,
            monitor=self._monitor(),
            kubernetes=kubernetes_status(self._kubernetes),
            kvstore=kvstore_status(self._kvstore),
            masquerading=self._masquerading(),
            services=self._services() if self._services is not None else NOTHING_SERVED,
            proxy=self._proxy(),
            host_firewall=self._host_firewall,
            host_routing=self._datapath.routing.mode,
        )


def kvstore_status(store: KVStore | None) -> wire.Status:
    """How the store that nodes share is."""
    if store is None:
        return wire.Status(state="Disabled")
    state = store.state()
    return wire.Status(state=state.state, msg=state.message)


def kubernetes_status(server: KubernetesAPI | None) -> wire.KubernetesStatus:
    """How the API server is, and what is followed there."""
    if server is None:
        return wire.KubernetesStatus(state="Disabled")
    state = server.state()
    followed = tuple(server.followed())
    return wire.KubernetesStatus(state=state.state, msg=state.message, k8s_api_versions=followed)


def monitor_status(events: EventsSettings, monitor: MonitorSettings) -> wire.MonitorStatus | None:
    """The rings that the datapath's events come from; None if the monitor is disabled."""
    if not monitor.enable_monitor:
        return None
    cpus, pages = os.sysconf("SC_NPROCESSORS_ONLN"), events.monitor_num_pages
    return wire.MonitorStatus(cpus=cpus, npages=pages, pagesize=mmap.PAGESIZE)


def map_sizes(maps: Maps) -> dict[str, int]:
    """Capacity of the maps, under the names and in the order of ``cilium-dbg status --verbose``."""
    policy = maps.policies.spec.inner
    tcp, other, *_ = maps.conntrack  # both families have as many
    return {
        "Non-TCP connection tracking": other.spec.max_entries,
        "TCP connection tracking": tcp.spec.max_entries,
        "Endpoint policy": policy.max_entries if policy else 0,
        "IP cache": maps.ipcache.spec.max_entries,
        "Metrics": maps.metrics.spec.max_entries,
    }
