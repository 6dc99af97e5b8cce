"""Kinds of links, and what the programs keep and tell: options that are not served yet.

Needs: nothing.   Gives: UnservedDatapath.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings
from lifecycle import Duration, seconds


class UnservedDatapath(UnservedSettings, frozen=True):
    """Kinds of links, and what the programs keep and tell."""

    datapath_mode: str = "veth"
    """Kind of the pods' links; netkit is not built yet."""

    enable_ipv4_fragment_tracking: bool = True
    """Fragments follow their first one, of both families."""

    bpf_conntrack_accounting: bool = False
    """Packets and bytes of each connection are not counted yet."""

    monitor_aggregation_interval: Duration = seconds(5)
    """How often a connection that goes on is reported again; it cannot be chosen yet."""

    enable_bpf_clock_probe: bool = False
    """Times in the conntrack maps are seconds since boot."""
