"""Settings of the endpoint cell.

For:   Endpoints.   Needs: nothing.   Gives: EndpointSettings.
"""

from lifecycle import Settings


class EndpointSettings(Settings, frozen=True):
    """What endpoints may send."""

    enable_source_ip_verification: bool = True
    """Drop what a pod sends from an address that is not its own."""
