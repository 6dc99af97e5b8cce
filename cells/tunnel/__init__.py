"""The tunnel to other nodes: VXLAN or Geneve over IPv4 or IPv6, one device for all of them.

The network between nodes needs no routes to pods: nodes encapsulate pods' packets, with the sender's identity
as VNI. Reconcilers keep the device ``cilium_vxlan`` or ``cilium_geneve`` with its programs, its configuration
for pods' programs (hive_tunnel), other nodes' pod CIDRs (cilium_tunnel_map) and the node's routes to them.
All keep working while no agent runs; with routing-mode=native the next start removes them.
"""

from cells.maps.node_maps import Maps
from cells.maps.records.cluster import TunnelKey, TunnelValue
from cells.maps.target import MapTarget, record
from cells.tunnel.kernel import TunnelKernel, TunnelMaps, TunnelNetwork
from cells.tunnel.remote import RemoteNetworks, TunnelEndpoints
from cells.tunnel.settings import RouteMtu, TunnelSettings, egress_gateway_use, pod_tunnel, tunnel_features
from cells.tunnel.tunnel import Tunnel, TunnelRequirements, WantedTunnel
from lifecycle import config, invoke, module, provide, provide_private

__all__ = ["cell"]


def tunnel_endpoints(maps: Maps, settings: TunnelSettings) -> TunnelEndpoints:
    """Create the reconciler's target of cilium_tunnel_map, keyed by network address."""
    if settings.tunnelled:
        maps.use("tunnels")
    return MapTarget(lambda: (maps.tunnels,), record(TunnelKey), record(TunnelValue), lambda row: row)


cell = module(
    "tunnel",
    "VXLAN or Geneve to other nodes",
    config(TunnelSettings),
    provide(
        egress_gateway_use,
        pod_tunnel,
        tunnel_features,
        Tunnel,
        RouteMtu,
        RemoteNetworks,
        TunnelNetwork,
        TunnelMaps,
        tunnel_endpoints,
    ),
    provide_private(TunnelKernel, TunnelRequirements, WantedTunnel),
    invoke(Tunnel, RemoteNetworks),
)
