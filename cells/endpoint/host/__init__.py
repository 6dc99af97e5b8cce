"""The node itself as an endpoint: what it may send and get, by policies with a nodeSelector.

Kernel edge: a policy map, and whether the programs go by it.
Needs:  PolicySettings, EndpointPolicies, PolicyMaps, Datapath.   Gives: HostEndpoint, HostPrograms.
Why:    a policy map outlives the agent, and stays in force meanwhile: restore must not take it for a
        pod's that is gone.

Settings: enable-host-firewall.
"""

from cells.datapath import Datapath
from cells.endpoint.host.host import HostEndpoint, HostPrograms
from lifecycle import module, provide

__all__ = ["HostEndpoint", "HostPrograms", "cell"]


def host_programs(datapath: Datapath) -> HostPrograms:
    """The node's datapath, as the host endpoint uses it."""
    return datapath


cell = module("host-endpoint", "The node itself as an endpoint", provide(host_programs, HostEndpoint))
