"""The router on a real node: created once, without disruption at a restart."""

import os
import socket
import struct
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Network, ip_interface
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute

from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import (
    NODE_NOTIFY_DROP,
    NODE_NOTIFY_POLICY_VERDICT,
    NODE_NOTIFY_SOCK,
    NODE_NOTIFY_TRACE,
    NodeConfig,
)
from cells.netlink.links import HostLinks
from cells.netlink.messages import IPInterface
from cells.netlink.rows import LinkInfo
from cells.node import router
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.node.router_kernel import without_link_local
from lifecycle import Hive
from tests.kernel.router.routed import DUAL, PODS, PODS6, agent, ip, routes6
from tests.support.namespaces import in_node, inside, new_netns
from tests.support.waiting import eventually

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


def gateway(hive: Hive) -> IPv4Address:
    """The router's IPv4 address."""
    found = hive.get(Router).gateways[-1]
    assert isinstance(found, IPv4Address)
    return found


def link(hive: Hive, name: str) -> LinkInfo:
    found = hive.get(HostLinks).find(name)
    assert found is not None
    return found


def addresses(hive: Hive, ifindex: int) -> list[IPInterface]:
    """Of a link, without what the kernel itself gave it."""
    return without_link_local(hive.get(HostLinks).addresses()[ifindex])


async def test_the_router_is_set_up(in_node: None) -> None:
    async with agent() as hive:
        made = hive.get(Router)
        host, net = link(hive, "cilium_host"), link(hive, "cilium_net")
        assert (host.peer_ifindex, net.peer_ifindex) == (net.ifindex, host.ifindex)
        for end in (host, net):
            assert (end.up, end.arp, end.kind) == (True, False, "veth")
            assert (end.tx_queue_length, end.mtu) == (1000, 1500)
        assert made.addressing() == {"ipv4": router.Addressing(gateway(hive), PODS)}
        assert gateway(hive) in PODS
        assert hive.get(Ipam).dump()[str(gateway(hive))] == "router"
        assert addresses(hive, host.ifindex) == [IPv4Interface(gateway(hive))]
        assert ip("route") == [
            f"10.0.1.0/24 via {gateway(hive)} dev cilium_host src {gateway(hive)}",
            f"{gateway(hive)} dev cilium_host scope link",
        ]
        value = hive.get(Maps).node.lookup(bytes(4))
        assert value is not None
        assert NodeConfig.unpack(value) == NodeConfig(
            router_ip=gateway(hive),
            host_ifindex=host.ifindex,
            host_mac=host.mac,
            net_ifindex=net.ifindex,
            net_mac=net.mac,
            pod_cidr=PODS,
            flags=NOTIFY_ALL,
            aggregation=MEDIUM,
        )
        for name, wanted in (("rp_filter", "0"), ("forwarding", "1"), ("accept_local", "1")):
            assert contents(f"/proc/sys/net/ipv4/conf/cilium_net/{name}") == wanted
        assert contents("/proc/sys/net/ipv4/conf/cilium_net/send_redirects") == "0"


NOTIFY_ALL = NODE_NOTIFY_DROP | NODE_NOTIFY_TRACE | NODE_NOTIFY_POLICY_VERDICT | NODE_NOTIFY_SOCK
MEDIUM = 3
"""Of NodeConfig: the events the datapath sends unless set otherwise."""


def contents(path: str) -> str:
    return Path(path).read_text(encoding="ascii").strip()


def state(hive: Hive) -> tuple[object, ...]:
    """All that a flow through the router depends on; a link that went down shows in its carrier changes."""
    return (
        gateway(hive),
        link(hive, "cilium_host"),
        link(hive, "cilium_net"),
        ip("route"),
        ip("addr"),
        contents("/sys/class/net/cilium_host/carrier_changes"),
    )


async def test_a_restart_changes_nothing_and_no_link_goes_down(in_node: None) -> None:
    async with agent() as hive:
        before = state(hive)
    async with agent() as hive:
        assert state(hive) == before


async def test_another_range_brings_another_address_and_the_old_one_goes(in_node: None) -> None:
    async with agent() as hive:
        old, index = gateway(hive), link(hive, "cilium_host").ifindex
    async with agent(**{"ipv4-range": "10.0.2.0/24"}) as hive:
        new = gateway(hive)
        assert new in IPv4Network("10.0.2.0/24")
        assert link(hive, "cilium_host").ifindex == index
        assert addresses(hive, index) == [IPv4Interface(new)]
        assert not [line for line in ip("route") if str(old) in line]
        assert len(ip("route")) == 2


async def test_a_damaged_pair_is_repaired(in_node: None) -> None:
    async with agent() as hive:
        before = (gateway(hive), link(hive, "cilium_host"))
        hive.get(HostLinks).add_address(before[1].ifindex, "cilium_host", IPv4Address("192.0.2.9"))
    for damage in ("set cilium_host down", "set cilium_net arp on", "set cilium_host mtu 1300 txqueuelen 7"):
        assert ip(f"link {damage}") == []
    async with agent() as hive:
        assert (gateway(hive), link(hive, "cilium_host")) == before
        assert addresses(hive, before[1].ifindex) == [IPv4Interface(before[0])]
        assert len(ip("route")) == 2


async def test_a_foreign_device_of_that_name_is_replaced(in_node: None) -> None:
    assert ip("link add cilium_host type bridge") == []
    async with agent() as hive:
        assert link(hive, "cilium_host").kind == "veth"


async def test_the_node_can_be_reached_at_the_routers_address(in_node: None) -> None:
    async with agent() as hive:
        listener = await anyio.create_tcp_listener(local_host=str(gateway(hive)))
        async with listener, anyio.create_task_group() as tasks:
            port = listener.extra(SocketAttribute.local_port)  # noqa: S610  (not Django's)
            tasks.start_soon(listener.serve, lambda stream: stream.aclose())
            async with await anyio.connect_tcp(str(gateway(hive)), port):
                tasks.cancel_scope.cancel()


async def test_a_router_of_both_families_is_set_up(in_node: None) -> None:
    async with agent(**DUAL) as hive:
        made = hive.get(Router)
        host, net = link(hive, "cilium_host"), link(hive, "cilium_net")
        ip6, ip4 = made.gateways
        assert (ip6 in PODS6, ip4 in PODS) == (True, True)
        assert list(made.addressing().items()) == [
            ("ipv6", router.Addressing(ip6, PODS6)),
            ("ipv4", router.Addressing(ip4, PODS)),
        ]
        dump = hive.get(Ipam).dump()
        assert (dump[str(ip6)], dump[str(ip4)]) == ("router", "router")
        assert addresses(hive, host.ifindex) == [ip_interface(ip4), ip_interface(ip6)]
        assert len(ip("route")) == 2
        assert routes6() == [
            f"{PODS6} dev cilium_host src {ip6} metric 1024",
            f"{ip6} dev cilium_host proto kernel metric 256",
        ]
        value = hive.get(Maps).node.lookup(bytes(4))
        assert value is not None
        assert NodeConfig.unpack(value) == NodeConfig(
            router_ip=gateway(hive),
            host_ifindex=host.ifindex,
            host_mac=host.mac,
            net_ifindex=net.ifindex,
            net_mac=net.mac,
            pod_cidr=PODS,
            router_ip6=IPv6Address(str(ip6)),
            pod_cidr6=PODS6,
            flags=NOTIFY_ALL,
            aggregation=MEDIUM,
        )
        for name, wanted in (("all/forwarding", "1"), ("cilium_host/accept_ra", "0")):
            assert contents(f"/proc/sys/net/ipv6/conf/{name}") == wanted
        before = state(hive), routes6()
    async with agent(**DUAL) as hive:
        assert (state(hive), routes6()) == before


async def test_a_family_that_is_switched_off_leaves_the_device(in_node: None) -> None:
    async with agent(**DUAL) as hive:
        _, ip4 = hive.get(Router).gateways
    async with agent() as hive:
        assert hive.get(Router).gateways == (ip4,)
        assert addresses(hive, link(hive, "cilium_host").ifindex) == [ip_interface(ip4)]
        assert routes6() == []
    async with agent(**DUAL, **{"enable-ipv4": "false"}) as hive:
        made = hive.get(Router)
        assert addresses(hive, link(hive, "cilium_host").ifindex) == [ip_interface(made.gateways[0])]
        assert (made.gateways[0] in PODS6, ip("route")) == (True, [])
        value = hive.get(Maps).node.lookup(bytes(4))
        assert value is not None
        assert (NodeConfig.unpack(value).router_ip, NodeConfig.unpack(value).pod_cidr) == (None, None)


async def test_the_range_of_ipv6_may_change(in_node: None) -> None:
    async with agent(**DUAL):
        pass
    async with agent(**{**DUAL, "ipv6-range": "fd00:2::/112"}) as hive:
        made = hive.get(Router)
        assert made.gateways[0] in IPv6Network("fd00:2::/112")
        assert [line.split()[0] for line in routes6()] == ["fd00:2::/112", str(made.gateways[0])]


def add_uplink() -> None:
    assert ip("link add uplink0 type veth peer name uplink1") == []
    for name in ("uplink0", "uplink1"):
        assert ip(f"link set {name} up") == []


def advertise(interface: str) -> None:
    """Be a router for half an hour: one RA to all nodes of the link (RFC 4861, section 4.2)."""
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as router_side:
        router_side.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        message = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
        router_side.sendto(message, ("ff02::1", 0, 0, socket.if_nametoindex(interface)))


async def test_a_device_that_listens_to_routers_keeps_its_default_route_and_goes_on(in_node: None) -> None:
    with new_netns() as outside:
        assert ip("link add uplink0 type veth peer name outside0") == []
        assert ip(f"link set outside0 netns /proc/{os.getpid()}/fd/{outside.net}") == []
        with inside(outside):
            assert ip("link set outside0 addrgenmode none") == []
            assert ip("link set outside0 up") == []
            assert ip("addr add fe80::1/64 dev outside0 nodad") == []
        assert ip("link set uplink0 up") == []

        def led() -> bool:
            """Whether there is the route; advertisements before the link is ready are lost."""
            with inside(outside):
                advertise("outside0")
            return any("via fe80::1 dev uplink0" in line for line in routes6())

        eventually(led)
        for _ in range(2):
            async with agent(**DUAL):
                assert contents("/proc/sys/net/ipv6/conf/uplink0/forwarding") == "1"
                assert any("via fe80::1 dev uplink0" in line for line in routes6())
        assert ip("-6 route del default") == []
        eventually(led)


async def test_addresses_of_the_node_are_not_the_routers(in_node: None) -> None:
    """Though cilium_host had one, and the range has one other left."""
    add_uplink()
    assert ip("addr add fd00:3::1/126 dev uplink0 nodad") == []
    async with agent(**{**DUAL, "ipv6-range": "fd00:3::/126"}) as hive:
        assert str(hive.get(Router).gateways[0]) == "fd00:3::2"


def written_by_an_earlier_agent() -> None:
    path = Path("/run/cilium/state/globals/node_config.h")
    path.parent.mkdir(parents=True)
    raw = {4: bytes(10) + b"\xff\xff" + bytes((10, 0, 1, 99)), 6: IPv6Address("fd00:1::99").packed}
    lines = (f" cilium.v{v}.internal.raw {', '.join(map(hex, data))}\n" for v, data in raw.items())
    path.write_text("".join(lines), encoding="ascii")


async def test_an_earlier_agents_addresses_are_taken_on(in_node: None) -> None:
    written_by_an_earlier_agent()
    async with agent(**DUAL) as hive:
        assert [*map(str, hive.get(Router).gateways)] == ["fd00:1::99", "10.0.1.99"]
