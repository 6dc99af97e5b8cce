"""Routes and addresses announced to others: options that are not served yet.

Needs: nothing.   Gives: UnservedAnnouncements.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedAnnouncements(UnservedSettings, frozen=True):
    """Routes and addresses announced to others."""

    enable_bgp_control_plane: bool = False
    """Routes are not announced yet."""

    enable_l2_pod_announcements: bool = False
    """Addresses of pods are not announced yet."""
