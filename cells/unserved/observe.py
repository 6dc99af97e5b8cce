"""Flows and probes of a cluster: options that are not served yet.

Needs: nothing.   Gives: UnservedObserve.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedObserve(UnservedSettings, frozen=True):
    """Flows and probes of a cluster."""

    enable_hubble: bool = False
    """Flows are not served yet; hive monitor shows them."""

    enable_health_checking: bool = False
    """Nodes do not probe each other yet."""

    enable_endpoint_health_checking: bool = False
    """Nodes do not probe each other yet."""
