"""The policies, ports and addresses of a node that receives hostile frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from tests.kernel.datapath.model_packet import Flow
from tests.support.hostile_node import (
    UDP_PORT,
    Sender,
)

WORLD, WORLD6 = "203.0.113.7", "2001:db8::7"
HOST_PORT: Final = 7002
PORTS: Final = (UDP_PORT, HOST_PORT, 22)
UDP: Final = 17


def policies() -> list[dict[str, Any]]:
    """Allow "friend" to "closed", world and attacker to one port of "open", world to one of the node."""
    port = [{"ports": [{"port": str(UDP_PORT), "protocol": "UDP"}]}]
    host_port = [{"ports": [{"port": str(HOST_PORT), "protocol": "UDP"}]}]
    attacker = [{"matchLabels": {"app": "attacker"}}]
    friends = [{"fromEndpoints": [{"matchLabels": {"app": "friend"}}]}]
    opened = [{"fromEntities": ["world"], "toPorts": port}, {"fromEndpoints": attacker, "toPorts": port}]
    node = {"nodeSelector": {"matchLabels": {"guarded": "yes"}}}
    specs = {
        "closed": {"endpointSelector": {"matchLabels": {"app": "closed"}}, "ingress": friends},
        "open": {"endpointSelector": {"matchLabels": {"app": "open"}}, "ingress": opened},
        "node": node | {"ingress": [{"fromEntities": ["world"], "toPorts": host_port}]},
    }
    kind = "CiliumClusterwideNetworkPolicy"
    return [
        {"apiVersion": "cilium.io/v2", "kind": kind, "metadata": {"name": name}, "spec": spec}
        for name, spec in specs.items()
    ]


def in_turn(made: Sequence[Callable[[int], bytes]], number: int) -> bytes:
    """Return a packet of IPv4, then one of IPv6."""
    return made[number // 10 % len(made)](number)


def asks_open(_: Sender, flow: Flow) -> bool:
    """Return whether "open" accepts this packet from outside the node, or from the attacker."""
    return flow.related or (flow.protocol, flow.dport) == (UDP, UDP_PORT)


def addresses_of(link: str) -> list[str]:
    """Return the addresses of a link in these namespaces."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=link)
        return [message.get("address") for message in ip.get_addr(index=index)]


def own_link_local(link: str) -> str:
    lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").split("\n")
    (found,) = [line.split()[0] for line in lines if line.startswith("fe80") and line.endswith(link)]
    return str(ip_address(bytes.fromhex(found)))
