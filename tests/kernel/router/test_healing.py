"""Removed parts of the router are restored: at once while the agent runs, else at the next start."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cells.node.router import Router
from lifecycle import Hive
from lifecycle.testing import eventually
from tests.kernel.router.routed import DUAL, agent, ip, routes6
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

DAMAGES = [
    "ip -6 addr del {ip6} dev cilium_host",
    "ip addr flush dev cilium_host",
    "ip addr del {ip4} dev cilium_host; ip addr add 10.0.1.200/32 dev cilium_host",
    "ip link del cilium_host",
    "ip link set cilium_host down; ip link set cilium_net down",
    "ip link set cilium_net mtu 1300",
    "ip route del 10.0.1.0/24",
    "ip route replace 10.0.1.0/24 dev cilium_host",
    "ip -6 route del fd00:1::/112",
    "tc qdisc del dev cilium_host clsact",
    "tc filter del dev cilium_net ingress",
    "echo 0 > /proc/sys/net/ipv6/conf/all/forwarding",
    "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter",
    "echo 0 > /proc/sys/net/ipv4/conf/cilium_net/forwarding",
    "echo 1 > /proc/sys/net/ipv6/conf/cilium_host/disable_ipv6",
]

SETTINGS = (
    "ipv4/conf/all/rp_filter",
    "ipv4/conf/cilium_host/rp_filter",
    "ipv4/conf/cilium_net/forwarding",
    "ipv4/conf/cilium_net/accept_local",
    "ipv6/conf/all/forwarding",
    "ipv6/conf/cilium_host/disable_ipv6",
    "ipv6/conf/cilium_host/accept_ra",
)


def seen() -> tuple[object, ...]:
    """All that a flow through the router depends on, as tools show it; indexes may change."""
    return (
        [line.partition(": ")[2].replace(" state UNKNOWN", "") for line in ip("link show type veth")],
        [line.split()[1:4] for line in ip("addr show dev cilium_host") if "link " not in line],
        ip("route"),
        routes6(),
        [len(tc(f"filter show dev {device} {way}")) for device, way in WAYS],
        [path.read_text() for name in SETTINGS if (path := Path("/proc/sys/net", name)).exists()],
    )


WAYS = (("cilium_host", "ingress"), ("cilium_host", "egress"), ("cilium_net", "ingress"))


def tc(command: str) -> list[str]:
    with os.popen(f"tc {command} 2>/dev/null") as output:  # noqa: S605
        return [line for line in output if "direct-action" in line]


def damage(hive: Hive, command: str) -> Callable[[], None]:
    """Does it, having checked that it makes a difference."""
    ip6, ip4 = hive.get(Router).gateways
    text = command.format(ip6=f"{ip6}/128", ip4=f"{ip4}/32")

    def do() -> None:
        before = seen()
        assert os.system(text) == 0  # noqa: S605
        assert seen() != before

    return do


async def test_a_removed_router_is_restored_while_the_agent_runs(in_node: None) -> None:
    async with agent(**DUAL) as hive:
        before, gateways = seen(), hive.get(Router).gateways
        for command in DAMAGES:
            damage(hive, command)()
            try:
                await eventually(lambda: seen() == before, within=30)
            except BaseException as error:
                error.add_note(f"after {command}:\n{seen()}\ninstead of\n{before}")
                raise
            assert hive.get(Router).gateways == gateways, command


async def test_a_removed_router_is_restored_by_the_next_start(in_node: None) -> None:
    for command in [*DAMAGES[:4], DAMAGES[9]]:
        async with agent(**DUAL) as hive:
            before, gateways = seen(), hive.get(Router).gateways
            do = damage(hive, command)
        do()
        async with agent(**DUAL) as hive:
            assert hive.get(Router).gateways == gateways, command
            assert seen() == before, command
