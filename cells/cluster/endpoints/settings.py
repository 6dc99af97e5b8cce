"""How nodes tell each other of their pods.

Needs: nothing.   Gives: ClusterEndpointSettings.
"""

from lifecycle import Settings


class ClusterEndpointSettings(Settings, frozen=True):
    """How nodes tell each other of their pods."""

    enable_cilium_endpoint_slice: bool = False
    """Take pods of other nodes from CiliumEndpointSlices, which the operator makes, not CiliumEndpoints."""
