"""The agent's configuration as GET /config tells it, and what PATCH /config may ask.

Needs: nothing.   Gives: NodeFacts, configuration_model, host_addressing, patch_refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from cells.api import models

POLICY_ENFORCEMENT = "default"
POLICY_ENFORCEMENTS = ("default", "always", "never")
IPAM_MODE = "cluster-pool"  # host-scope allocation from one range
DATAPATH_MODE = "veth"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the plugin must know of the node. The MTU is of pod links and of the uplinks, in bytes."""

    router_ip: IPv4Address
    pod_cidr: IPv4Network
    mtu: int


def host_addressing(node: NodeFacts) -> models.NodeAddressing:
    """The router's address and the pod CIDR; there is no IPv6, so its key is absent."""
    return models.NodeAddressing(
        ipv4=models.NodeAddressingElement(
            enabled=True, ip=str(node.router_ip), alloc_range=str(node.pod_cidr)
        )
    )


def configuration_model(node: NodeFacts, settings: Mapping[str, object]) -> models.DaemonConfiguration:
    """The answer to GET /config; ``settings`` is shown to people as the daemon's configuration map."""
    spec = models.DaemonConfigurationSpec(options={}, policy_enforcement=POLICY_ENFORCEMENT)
    return models.DaemonConfiguration(
        spec=spec,
        status=models.DaemonConfigurationStatus(
            addressing=host_addressing(node),
            realized=spec,
            immutable={},
            daemon_configuration_map=dict(settings),
            kvstore_configuration=models.KVStoreConfiguration(),
            datapath_mode=DATAPATH_MODE,
            device_mtu=node.mtu,
            route_mtu=node.mtu,
            ipam_mode=IPAM_MODE,
            masquerade_protocols=models.MasqueradeProtocols(),
        ),
    )


def patch_refusal(wanted: models.DaemonConfigurationSpec) -> str | None:
    """Why PATCH /config cannot be done, None when it asks for what is already so.

    Nothing can be changed while the agent runs yet; clients send the whole configuration back, so what is
    unchanged is accepted.
    """
    enforcement = wanted.policy_enforcement.lower()
    if enforcement and enforcement not in POLICY_ENFORCEMENTS:
        return f"invalid option for PolicyEnforcement {wanted.policy_enforcement}"
    if enforcement and enforcement != POLICY_ENFORCEMENT:
        return f"PolicyEnforcement cannot be {enforcement}: there is no network policy yet, leave it default"
    if wanted.options:
        return f"unknown option {min(wanted.options)}: no option can be changed while the agent runs"
    return None
