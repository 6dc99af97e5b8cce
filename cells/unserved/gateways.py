"""Ways out of the cluster, and groups: options that are not served yet.

Needs: nothing.   Gives: UnservedGateways.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedGateways(UnservedSettings, frozen=True):
    """Ways out of the cluster, and groups."""

    multicast_enabled: bool = False
    """Groups of pods are not built yet."""

    enable_ipv4_egress_gateway: bool = False
    """There are no gateways for traffic to the outside yet."""

    enable_srv6: bool = False
    """Segment routing is not built yet."""

    enable_vtep: bool = False
    """Foreign tunnel endpoints are not known yet."""
