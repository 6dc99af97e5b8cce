"""Policies, of pods and of the node: options that are not served yet.

Needs: nothing.   Gives: UnservedPolicy.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedPolicy(UnservedSettings, frozen=True):
    """Policies, of pods and of the node."""

    enable_xdp_prefilter: bool = False
    """Packets are not dropped by the driver yet."""

    enable_tracing: bool = False
    """Policy decisions are not logged; `hive monitor` shows verdicts."""
