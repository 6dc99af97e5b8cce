"""Pods reach the world behind the node's address: programs on native devices translate their source.

Reconciler: the table ``native-devices`` follows the node's devices; programs are attached to each, and
``hive_devices`` tells them what packets come from. The table ``ip-masq-networks`` follows the file of
ip-masq-agent and is kept in ``cilium_ipmasq_v4`` and ``cilium_ipmasq_v6``.
Needs:  Table[Device], NodeAddresses, Router, Datapath, Maps.
Gives:  Table[MasqueradedNetwork], Masquerade.
Why:    networks outside have no routes to pods' addresses. The node's own packets stay as they are, unless a
        pod was given the port they come from.

Settings: enable-ipv4-masquerade, enable-ipv6-masquerade, enable-bpf-masquerade, ipv4-native-routing-cidr,
ipv6-native-routing-cidr, egress-masquerade-interfaces, derive-masq-ip-addr-from-device, enable-ip-masq-agent,
ip-masq-agent-config-path.
"""

from cells.api import MasqueradeReport
from cells.masquerade.agent import IpMasqAgent, MasqueradedNetwork, network_table
from cells.masquerade.devices import NativeDevice
from cells.masquerade.masquerade import Masquerade
from cells.masquerade.settings import MasqueradeSettings
from lifecycle import Member, after, config, invoke, module, provide

__all__ = ["Masquerade", "MasqueradeSettings", "MasqueradedNetwork", "NativeDevice", "cell"]


def report(masquerade: Masquerade) -> Member[MasqueradeReport]:
    """What is masqueraded, for the agent's status."""
    return MasqueradeReport(masquerade.report)


@after(Masquerade, IpMasqAgent)
def run() -> None:
    """Both are part of the agent though no cell depends on them."""


cell = module(
    "masquerade",
    "Pods behind the node's address",
    config(MasqueradeSettings),
    provide(Masquerade, IpMasqAgent, network_table, report),
    invoke(run),
)
