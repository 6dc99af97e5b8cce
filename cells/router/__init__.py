"""The pods' gateway: its addresses, one of each family, and the devices cilium_host and cilium_net.

Reconciler, once: makes or repairs the pair, claims the addresses, sets routes and sysctls, attaches programs.
Needs:  RestoredEndpoints, Ipam, HostLinks, Datapath, Table[Device], AgentConfig.   Gives: Router.
Why:    pods' routes name these addresses, so they outlive restarts; they are claimed after the pods' own, so
        that a new choice is never the address of a running pod.
"""

from cells.router.router import Addressing, Router
from lifecycle import module, provide

__all__ = ["Addressing", "Router", "cell"]

cell = module("router", "Gateway of this node's pods", provide(Router))
