"""Settings of masquerading, under Cilium's names.

Needs: nothing.   Gives: MasqueradeSettings.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from lifecycle import Settings


class MasqueradeSettings(Settings, frozen=True):
    """Which of the pods' packets leave with the node's address."""

    enable_ipv4_masquerade: bool | None = None
    """Masquerade pods' IPv4 packets with the node's address; unset: true, unless another plugin makes the
    pods' links (cni-chaining-mode)."""

    enable_ipv6_masquerade: bool | None = None
    """The same for IPv6."""

    enable_bpf_masquerade: bool = True
    """Masquerade in eBPF; there is no iptables implementation."""

    ipv4_native_routing_cidr: IPv4Network | None = None
    """Network in which pod addresses are routed: packets to it are not masqueraded; unset: the pods'
    range."""

    ipv6_native_routing_cidr: IPv6Network | None = None
    """The same for IPv6."""

    egress_masquerade_interfaces: tuple[str, ...] = ()
    """Devices to masquerade on; eth+ matches all names that start with eth; unset: all through which packets
    leave the node."""

    derive_masq_ip_addr_from_device: str = ""
    """Device whose address masqueraded packets get; unset: the device they leave through."""

    enable_ip_masq_agent: bool = False
    """Also do not masquerade packets to the networks in ip-masq-agent's file."""

    ip_masq_agent_config_path: Path = Path("/etc/config/ip-masq-agent")
    """Path of that file, YAML or JSON; without one, private and reserved networks are used."""

    def validate(self) -> None:
        """Refuse masquerading by iptables; raises ValueError with one line."""
        wants = (self.enable_ipv4_masquerade, self.enable_ipv6_masquerade)
        if not self.enable_bpf_masquerade and wants != (False, False):
            raise ValueError(
                "enable-bpf-masquerade=false: rules of iptables are not made; masquerade by eBPF with"
                " enable-bpf-masquerade=true, or not at all with enable-ipv4-masquerade=false and"
                " enable-ipv6-masquerade=false"
            )
