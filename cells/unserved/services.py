"""Services and their load balancing: options that are not served yet.

Needs: nothing.   Gives: UnservedServices.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedServices(UnservedSettings, frozen=True):
    """Services and their load balancing."""

    enable_nat46x64_gateway: bool = False
    """Translation between IPv4 and IPv6."""
