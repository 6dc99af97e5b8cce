"""Whether this node routes to other nodes' pods by itself.

Needs: nothing.   Gives: DirectRouteSettings.
"""

from lifecycle import Settings


class DirectRouteSettings(Settings, frozen=True):
    """Settings of the routes to other nodes."""

    auto_direct_node_routes: bool = False
    """Install a route to every other node's pods via that node, for nodes that share a network."""

    direct_routing_skip_unreachable: bool = False
    """Skip nodes that are behind a router, with a warning; otherwise that is an error."""

    def validate(self) -> None:
        """Refuse what has no meaning; raises ValueError."""
        if self.direct_routing_skip_unreachable and not self.auto_direct_node_routes:
            raise ValueError("direct-routing-skip-unreachable needs auto-direct-node-routes")
