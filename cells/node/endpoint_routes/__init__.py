"""Routes to this node's pods, each over its own link (enable-endpoint-routes).

Reconciler: the table ``endpoints`` in, routes of the main table out; ``endpoint-routes`` tells which are
        wanted, ``endpoint-routes-status`` which are there.
Needs:  EndpointSettings, Table[Endpoint], ExposedEndpoints, AgentConfig, HostLinks, Sysctls.
Gives:  EndpointRouteKeeper.
Why:    addresses of another IPAM plugin lie in no range that one route could lead to. An endpoint's routes
        are set with it; this restores removed routes, and removes those left from other settings.
"""

from cells.node.endpoint_routes.kernel import KernelRoutes
from cells.node.endpoint_routes.routes import EndpointRoute, EndpointRouteKeeper, RouteKernel, wanted
from cells.node.netlink import HostLinks
from lifecycle import invoke, module, provide, provide_private

__all__ = ["EndpointRoute", "EndpointRouteKeeper", "RouteKernel", "cell", "wanted"]


def kernel(links: HostLinks) -> RouteKernel:
    """The node's routes."""
    return KernelRoutes(links)


cell = module(
    "endpoint-routes",
    "Routes to this node's pods",
    provide(EndpointRouteKeeper),
    provide_private(kernel),
    invoke(EndpointRouteKeeper),
)
