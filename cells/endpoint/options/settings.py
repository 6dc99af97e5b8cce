"""Settings of the endpoint cell.

For:   Endpoints.   Needs: nothing.   Gives: EndpointSettings.
"""

from lifecycle import Settings


class EndpointSettings(Settings, frozen=True):
    """Source addresses and routes of endpoints."""

    enable_source_ip_verification: bool = True
    """Drop what a pod sends from an address that is not its own."""

    enable_endpoint_routes: bool = False
    """Give each pod a route of its own over its link, so that packets pass the host's stack, also between
    pods of this node. Running pods get theirs at the next start."""
