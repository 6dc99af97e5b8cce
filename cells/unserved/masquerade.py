"""Translation of pods' addresses on the way out: options that are not served yet.

Needs: nothing.   Gives: UnservedMasquerade.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedMasquerade(UnservedSettings, frozen=True):
    """Translation of pods' addresses on the way out."""

    install_no_conntrack_iptables_rules: bool = False
    """No rules of iptables are made."""
