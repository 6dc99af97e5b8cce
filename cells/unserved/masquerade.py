"""Translation of pods' addresses on the way out: options that are not served yet.

Needs: nothing.   Gives: UnservedMasquerade.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedMasquerade(UnservedSettings, frozen=True):
    """Translation of pods' addresses on the way out."""

    install_no_conntrack_iptables_rules: bool = False
    """No rules of iptables are made."""

    enable_ipv4_masquerade: bool = False
    """Pods' addresses are not translated yet when they leave the node."""

    enable_ipv6_masquerade: bool = False
    """The same of IPv6."""

    enable_bpf_masquerade: bool = False
    """The same, by eBPF."""

    enable_ip_masq_agent: bool = False
    """The same, with exceptions."""
