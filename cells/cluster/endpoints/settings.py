"""How nodes learn of each other's pods.

Needs: nothing.   Gives: ClusterEndpointSettings.
"""

from lifecycle import Settings


class ClusterEndpointSettings(Settings, frozen=True):
    """How nodes learn of each other's pods."""

    enable_cilium_endpoint_slice: bool = False
    """Read other nodes' pods from CiliumEndpointSlices, which the operator writes, not CiliumEndpoints."""
