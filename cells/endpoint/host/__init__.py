"""The node itself as an endpoint: what it may send and get, by policies with a nodeSelector.

Kernel edge: a policy map, and whether the programs go by it.
Needs:  PolicySettings, EndpointPolicies, Maps, PolicyMaps, Datapath.   Gives: HostEndpoint, HostPrograms.
Why:    a policy map outlives the agent, and stays in force meanwhile: restore must not take it for a
        pod's that is gone.

Settings: enable-host-firewall.
"""

from cells.datapath import Datapath
from cells.endpoint.host.host import HostEndpoint, HostPrograms
from cells.maps import Maps
from cells.policy.maps import PolicySettings
from lifecycle import module, provide

__all__ = ["HostEndpoint", "HostPrograms", "cell"]


def host_programs(datapath: Datapath, maps: Maps, settings: PolicySettings) -> HostPrograms:
    """The node's datapath, as the host endpoint uses it; the node has IPv6 though its pods have none."""
    if settings.enable_host_firewall:
        maps.use("ct4_tcp", "ct4_any", "ct6_tcp", "ct6_any", "fragments4", "fragments6", both_families=True)
    return datapath


cell = module("host-endpoint", "The node itself as an endpoint", provide(host_programs, HostEndpoint))
