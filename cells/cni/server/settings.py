"""The setting of attachments on links of other plugins', under Cilium's name.

Needs: nothing.   Gives: ChainingSettings.
"""

from lifecycle import Settings


class ChainingSettings(Settings, frozen=True):
    """What our plugin does when it is chained after another."""

    enable_route_mtu_for_cni_chaining: bool = False
    """Give the routes of pods on other plugins' links this node's MTU."""
