"""Running pods follow the MTU of the node's devices: their links, and the routes inside.

Reconciler: Table[Device] and Table[Endpoint] in; both ends of pods' links out, and pods' own routes.
Needs:  Table[Device], Table[Endpoint], HostLinks, PodMtu, RouteMtu.   Gives: LinkMtu.
Why:    a network that gets smaller would leave pods to find out with each packet that is lost, and one that
        gets larger would not be used before they are created again.
Source: Cilium 1.17, which follows the MTU at run time as well.
"""

from cells.cni.link_mtu.inside import resize_pods
from cells.cni.link_mtu.link_mtu import LinkMtu
from lifecycle import invoke, module, provide

__all__ = ["LinkMtu", "cell", "resize_pods"]

cell = module("link-mtu", "MTU of running pods' links", provide(LinkMtu), invoke(LinkMtu))
