"""Settings of masquerading, under Cilium's names.

Needs: nothing.   Gives: MasqueradeSettings.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from lifecycle import Settings


class MasqueradeSettings(Settings, frozen=True):
    """Which packets of pods come from the node's address once they leave it."""

    enable_ipv4_masquerade: bool | None = None
    """Pods' IPv4 packets leave with the node's address; unset: true, unless another plugin makes pods' links
    (cni-chaining-mode), which has ways of its own."""

    enable_ipv6_masquerade: bool | None = None
    """The same of IPv6."""

    enable_bpf_masquerade: bool = True
    """By eBPF; there is no other way: rules of iptables are not made."""

    ipv4_native_routing_cidr: IPv4Network | None = None
    """Network in which pods' addresses are routed: nothing to there is translated; unset: the pods' range."""

    ipv6_native_routing_cidr: IPv6Network | None = None
    """The same of IPv6."""

    egress_masquerade_interfaces: tuple[str, ...] = ()
    """Devices that packets are masqueraded on, eth+ for all whose names begin with eth; unset: all that
    packets leave the node through."""

    derive_masq_ip_addr_from_device: str = ""
    """Device whose address packets get, whichever they leave by; unset: the one's they leave by."""

    enable_ip_masq_agent: bool = False
    """Packets to the networks of ip-masq-agent's file are not masqueraded either."""

    ip_masq_agent_config_path: Path = Path("/etc/config/ip-masq-agent")
    """That file, YAML or JSON; while there is none, private and reserved networks are taken."""

    def validate(self) -> None:
        """Refuse masquerading by iptables; raises ValueError with one line."""
        wants = (self.enable_ipv4_masquerade, self.enable_ipv6_masquerade)
        if not self.enable_bpf_masquerade and wants != (False, False):
            raise ValueError(
                "enable-bpf-masquerade=false: rules of iptables are not made; masquerade by eBPF with"
                " enable-bpf-masquerade=true, or not at all with enable-ipv4-masquerade=false and"
                " enable-ipv6-masquerade=false"
            )
