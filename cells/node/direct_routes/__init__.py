"""Routes to the pods of other nodes over a network they share (auto-direct-node-routes).

Reconciler: the table ``nodes`` in, routes of the main table out; ``direct-routes`` tells which are wanted,
        ``direct-routes-status`` which are there.
Needs:  DirectRouteSettings, ReadTable[ClusterNode], Table[Device].   Gives: DirectRoutes.
Why:    without a tunnel, only routes say which node has a pod.
"""

from cells.node.direct_routes.kernel import KernelRoutes
from cells.node.direct_routes.routes import DirectRoute, DirectRoutes, RouteKernel, wanted
from cells.node.direct_routes.settings import DirectRouteSettings
from lifecycle import after, config, invoke, module, provide, provide_private

__all__ = ["DirectRoute", "DirectRouteSettings", "DirectRoutes", "RouteKernel", "cell", "wanted"]


def kernel() -> RouteKernel:
    """The node's routes."""
    return KernelRoutes()


@after(DirectRoutes)
def keep() -> None:
    """The routes are kept whether or not anybody asks."""


cell = module(
    "direct-routes",
    "Routes to other nodes' pods",
    config(DirectRouteSettings),
    provide(DirectRoutes),
    provide_private(kernel),
    invoke(keep),
)
