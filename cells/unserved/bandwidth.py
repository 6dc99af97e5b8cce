"""Bandwidth of pods, and large packets: options that are not served yet.

Needs: nothing.   Gives: UnservedBandwidth.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedBandwidth(UnservedSettings, frozen=True):
    """Bandwidth of pods, and large packets."""

    enable_bandwidth_manager: bool = False
    """Pods' bandwidth is not limited yet."""

    enable_bbr: bool = False
    """Pods' congestion control is not chosen yet."""

    enable_ipv4_big_tcp: bool = False
    """Packets beyond 64 KiB are not used yet."""

    enable_ipv6_big_tcp: bool = False
    """Packets beyond 64 KiB are not used yet."""
