"""Settings of the endpoint cell.

For:   Endpoints.   Needs: nothing.   Gives: EndpointSettings.
"""

from lifecycle import Settings


class EndpointSettings(Settings, frozen=True):
    """What endpoints may send, and by which way."""

    enable_source_ip_verification: bool = True
    """Drop what a pod sends from an address that is not its own."""

    enable_endpoint_routes: bool = False
    """Give each pod a route of its own over its link: packets then take the host's stack, also between pods
    of this node. Running pods follow at the next start."""
