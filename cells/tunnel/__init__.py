"""The tunnel to other nodes: VXLAN or Geneve over IPv4 or IPv6, one device for all of them.

Reconciler: keeps the device ``cilium_vxlan`` or ``cilium_geneve`` with its programs, what pods' programs
            know of it (hive_tunnel), the ranges of other nodes' pods (cilium_tunnel_map) and the node's
            routes to them.
Why:        the network between nodes need not know pods' addresses: pods' packets travel inside those of
            nodes, with the sender's identity as the virtual network identifier. Device, maps and programs
            forward on while no agent runs; in native mode the next start removes them.
"""

from cells.maps.node_maps import Maps
from cells.maps.records.cluster import TunnelKey, TunnelValue
from cells.maps.target import MapTarget, record
from cells.tunnel.kernel import TunnelKernel, TunnelMaps, TunnelNetwork
from cells.tunnel.remote import RemoteNetworks, TunnelEndpoints
from cells.tunnel.settings import RouteMtu, TunnelSettings, egress_gateway_use, pod_tunnel, tunnel_metrics
from cells.tunnel.tunnel import Tunnel, TunnelRequirements, WantedTunnel
from lifecycle import after, config, invoke, module, provide, provide_private

__all__ = ["cell"]


def tunnel_endpoints(maps: Maps, settings: TunnelSettings) -> TunnelEndpoints:
    """cilium_tunnel_map, by network address."""
    if settings.tunnelled:
        maps.use("tunnels")
    return MapTarget(lambda: (maps.tunnels,), record(TunnelKey), record(TunnelValue), lambda row: row)


@after(Tunnel, RemoteNetworks)
def keep() -> None:
    """The tunnel is part of the agent though no cell depends on it."""


cell = module(
    "tunnel",
    "VXLAN or Geneve to other nodes",
    config(TunnelSettings),
    provide(
        egress_gateway_use,
        pod_tunnel,
        tunnel_metrics,
        Tunnel,
        RouteMtu,
        RemoteNetworks,
        TunnelNetwork,
        TunnelMaps,
        tunnel_endpoints,
    ),
    provide_private(TunnelKernel, TunnelRequirements, WantedTunnel),
    invoke(keep),
)
