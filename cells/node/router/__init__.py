"""The pods' gateway: its addresses, one of each family, and the devices cilium_host and cilium_net.

Reconciler: claims the addresses, then keeps the pair, its programs, addresses and routes as the table
``router`` says, and has Sysctls keep the kernel settings.
Needs:  RestoredEndpoints, Ipam, IpamSettings, EndpointSettings, HostLinks, Datapath, Sysctls, Table[Device],
        AgentConfig.   Gives: Router.
Why:    pods' routes name these addresses, so they outlive restarts; they are claimed after the pods' own, so
        that a new choice is never the address of a running pod.
"""

from cells.node.router.router import Addressing, Router
from lifecycle import module, provide

__all__ = ["Addressing", "Router", "cell"]

cell = module("router", "Gateway of this node's pods", provide(Router))
