"""Every packed message equals what pyroute2 encodes, byte by byte."""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from socket import if_nametoindex
from typing import Any

import msgspec
import pytest
from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from cells.netlink import messages, network
from cells.netlink.messages import OffloadLimits, VethPair
from cells.netlink.network import FwmarkRule
from cells.netlink.overlay import mtu_and_up, new_overlay, read_overlay
from cells.netlink.wire import Message, Request, encode

MAC_A = bytes.fromhex("02aabbccdd01")
MAC_B = bytes.fromhex("02aabbccdd02")
POD = IPv4Address("10.0.1.7")
ROUTER = IPv4Address("10.0.1.5")

REQUEST, ACK, CREATE, EXCL, REPLACE, DUMP = 0x1, 0x4, 0x400, 0x200, 0x100, 0x300


def filled(message: Any, kind: int, flags: int, fields: dict[str, Any], attributes: list[Any]) -> bytes:
    """pyroute2's bytes for a message."""
    message["header"].update({"type": kind, "flags": flags, "sequence_number": 7, "pid": 0})
    for name, value in fields.items():
        message[name] = value
    message["attrs"] = attributes
    message.encode()
    return bytes(message.data)


def link(kind: int, flags: int, fields: dict[str, Any], attributes: list[Any]) -> bytes:
    return filled(ifinfmsg(), kind, flags, fields, attributes)


def end_of_veth(name: str, mac: str, *more: Any) -> list[Any]:
    return [
        ("IFLA_IFNAME", name),
        ("IFLA_ADDRESS", mac),
        ("IFLA_MTU", 1450),
        ("IFLA_TXQLEN", 1000),
        ("IFLA_NUM_TX_QUEUES", 1),
        ("IFLA_NUM_RX_QUEUES", 1),
        *more,
    ]


def veth(netns: list[Any], *more: Any) -> bytes:
    peer = {"attrs": [*end_of_veth("eth0", "02:aa:bb:cc:dd:02", *more), *netns]}
    info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", peer)]})]}
    attributes = [*end_of_veth("lxc0123456789ab", "02:aa:bb:cc:dd:01", *more), ("IFLA_LINKINFO", info)]
    return link(16, REQUEST | ACK | CREATE | EXCL, {}, attributes)


def activated() -> bytes:
    """pyroute2 has no encoder for IFLA_AF_SPEC/AF_INET devconf: that one attribute is by linux/if_link.h."""
    # AF_SPEC(20) > AF_INET(16) > IFLA_INET_CONF(12) > entry 8 = IPV4_DEVCONF_RP_FILTER, value 0
    specification = bytes.fromhex("1400 1a00  1000 0200  0c00 0100  0800 0800 00000000")
    fields = {"index": 12, "flags": 1, "change": 1}
    sent = link(19, REQUEST | ACK, fields, [("IFLA_IFALIAS", "hive endpoint 7")]) + specification
    return len(sent).to_bytes(4, "little") + sent[4:]


def address(kind: int, flags: int, attributes: list[Any], other: dict[str, int] | None = None) -> bytes:
    fields = {"family": 2, "prefixlen": 32, "index": 2, **(other or {})}
    return filled(ifaddrmsg(), kind, REQUEST | ACK | flags, fields, attributes)


def route(
    flags: int, prefix: int, scope: int, attributes: list[Any], family: int = 2, proto: int = 3
) -> bytes:
    fields = {"family": family, "dst_len": prefix, "table": 254, "proto": proto, "scope": scope, "type": 1}
    return filled(rtmsg(), 24, REQUEST | ACK | flags, fields, attributes)


def tc(kind: int, flags: int, fields: dict[str, Any], attributes: list[Any]) -> bytes:
    return filled(tcmsg(), kind, REQUEST | ACK | flags, {"index": 12, **fields}, attributes)


def bpf_filter(parent: int) -> bytes:
    options = {"attrs": [("TCA_BPF_FD", 33), ("TCA_BPF_NAME", "cil_from_container"), ("TCA_BPF_FLAGS", 1)]}
    fields = {"handle": 1, "parent": parent, "info": 0x00010300}
    return tc(44, CREATE | REPLACE, fields, [("TCA_KIND", "bpf"), ("TCA_OPTIONS", options)])


PAIR = VethPair("lxc0123456789ab", MAC_A, "eth0", MAC_B, 1450, 9)
HERE = VethPair("lxc0123456789ab", MAC_A, "eth0", MAC_B, 1450, None)
LARGE = OffloadLimits(gro=196608, gso=131072, gro_ipv4=0, gso_ipv4=0)  # pyroute2 does not know the last two
LARGE_SIZES = ("IFLA_GRO_MAX_SIZE", 196608), ("IFLA_GSO_MAX_SIZE", 131072)


def vxlan(more: list[Any]) -> bytes:
    data = [
        ("IFLA_VXLAN_COLLECT_METADATA", True),
        ("IFLA_VXLAN_LEARNING", False),
        ("IFLA_VXLAN_PORT", 8472),
        *more,
    ]
    info = {"attrs": [("IFLA_INFO_KIND", "vxlan"), ("IFLA_INFO_DATA", {"attrs": data})]}
    attributes = [("IFLA_IFNAME", "cilium_vxlan"), ("IFLA_MTU", 1500), ("IFLA_LINKINFO", info)]
    return link(16, REQUEST | ACK | CREATE | EXCL, {}, attributes)


def geneve() -> bytes:
    """As Cilium's setupGeneveDevice asks for it."""
    data = [("IFLA_GENEVE_COLLECT_METADATA", True), ("IFLA_GENEVE_PORT", 6081)]
    info = {"attrs": [("IFLA_INFO_KIND", "geneve"), ("IFLA_INFO_DATA", {"attrs": data})]}
    attributes = [("IFLA_IFNAME", "cilium_geneve"), ("IFLA_MTU", 1500), ("IFLA_LINKINFO", info)]
    return link(16, REQUEST | ACK | CREATE | EXCL, {}, attributes)


def test_a_geneve_device_is_read_as_the_kernel_shows_it() -> None:
    body = geneve()[16:]
    found = read_overlay(Message(messages.RTM_NEWLINK, 0, 1, body))
    assert (found.kind, found.port, found.metadata, found.mtu) == ("geneve", 6081, True, 1500)


MARK = FwmarkRule(mark=0x200, mask=0xF00, table=2004, priority=9)


def marked_rule(kind: int, flags: int) -> bytes:
    attributes = [("FRA_PRIORITY", 9), ("FRA_FWMARK", 0x200), ("FRA_TABLE", 2004), ("FRA_FWMASK", 0xF00)]
    fields = {"family": 10, "table": 252, "action": 1}
    return filled(fibmsg(), kind, REQUEST | ACK | flags, fields, attributes)


def marked_route(kind: int, flags: int) -> bytes:
    fields = {"family": 10, "table": 252, "proto": 4, "scope": 254, "type": 2}
    return filled(
        rtmsg(), kind, REQUEST | ACK | flags, fields, [("RTA_TABLE", 2004), ("RTA_OIF", if_nametoindex("lo"))]
    )


CASES: dict[str, tuple[Request, Callable[[], bytes]]] = {
    "veth with its peer in a pod": (
        messages.create_veth(PAIR),
        lambda: veth([("IFLA_NET_NS_FD", 9)]),
    ),
    "veth with both ends here": (messages.create_veth(HERE), lambda: veth([])),
    "veth for large packets": (
        messages.create_veth(msgspec.structs.replace(PAIR, limits=LARGE)),
        lambda: veth([("IFLA_NET_NS_FD", 9)], *LARGE_SIZES),
    ),
    "limits of GSO and GRO": (
        messages.set_offloads(12, LARGE),
        lambda: link(19, REQUEST | ACK, {"index": 12}, [*LARGE_SIZES]),
    ),
    "VXLAN": (new_overlay("vxlan", "cilium_vxlan", 1500, 8472, (0, 0)), lambda: vxlan([])),
    "Geneve": (new_overlay("geneve", "cilium_geneve", 1500, 6081, (0, 0)), geneve),
    "VXLAN that sends from a range of ports": (
        new_overlay("vxlan", "cilium_vxlan", 1500, 8472, (40000, 40999)),
        lambda: vxlan([("IFLA_VXLAN_PORT_RANGE", {"low": 40000, "high": 40999})]),
    ),
    "a rule for marked packets": (
        network.rule(network.RTM_NEWRULE, CREATE | EXCL, MARK, 10, ()),
        lambda: marked_rule(32, CREATE | EXCL),
    ),
    "no rule for marked packets": (
        network.rule(network.RTM_DELRULE, 0, MARK, 10, ()),
        lambda: marked_rule(33, 0),
    ),
    "a route that takes everything": (
        network.route(messages.RTM_NEWROUTE, CREATE | REPLACE, MARK, 10, ()),
        lambda: marked_route(24, CREATE | REPLACE),
    ),
    "VXLAN up": (
        mtu_and_up(12, "cilium_vxlan", 1400),
        lambda: link(19, REQUEST | ACK, {"index": 12, "flags": 1, "change": 1}, [("IFLA_MTU", 1400)]),
    ),
    "look a link up": (
        messages.get_link("cilium_host"),
        lambda: link(18, REQUEST | ACK, {}, [("IFLA_IFNAME", "cilium_host"), ("IFLA_EXT_MASK", 8)]),
    ),
    "look a link up by its index": (
        messages.get_link_at(12),
        lambda: link(18, REQUEST | ACK, {"index": 12}, [("IFLA_EXT_MASK", 8)]),
    ),
    "another MAC address": (
        messages.set_mac(12, "eth0", MAC_B),
        lambda: link(19, REQUEST | ACK, {"index": 12}, [("IFLA_ADDRESS", MAC_B.hex(":"))]),
    ),
    "set the MTU": (
        messages.set_mtu(12, 1450),
        lambda: link(19, REQUEST | ACK, {"index": 12}, [("IFLA_MTU", 1450)]),
    ),
    "a route as it was shown": (
        messages.replace_route("0.0.0.0/0", messages.add_route(2, IPv4Network("0.0.0.0/0"), via=ROUTER).body),
        lambda: route(CREATE | REPLACE, 0, 0, [("RTA_GATEWAY", str(ROUTER)), ("RTA_OIF", 2)]),
    ),
    "sync carrier": (
        messages.sync_carrier(12),
        lambda: link(18, REQUEST | ACK, {"index": 12}, [("IFLA_EXT_MASK", 8)]),
    ),
    "list links": (
        messages.dump_links(),
        lambda: link(18, REQUEST | ACK | DUMP, {}, [("IFLA_EXT_MASK", 8)]),
    ),
    "activate": (messages.activate_link(12, "hive endpoint 7"), activated),
    "up": (
        messages.link_up(2, "eth0"),
        lambda: link(19, REQUEST | ACK, {"index": 2, "flags": 1, "change": 1}, []),
    ),
    "attach XDP in the driver": (
        messages.set_xdp(12, 33, generic=False, instead_of=None),
        lambda: link(
            19,
            REQUEST | ACK,
            {"index": 12},
            [("IFLA_XDP", {"attrs": [("IFLA_XDP_FD", 33), ("IFLA_XDP_FLAGS", 1 | 4)]})],
        ),
    ),
    "set a device up": (
        messages.set_device(3, "cilium_host", 1500),
        lambda: link(
            19,
            REQUEST | ACK,
            {"index": 3, "flags": 0x81, "change": 0x81},
            [("IFLA_MTU", 1500), ("IFLA_TXQLEN", 1000)],
        ),
    ),
    "group": (
        messages.set_group(12, 0x40000001),
        lambda: link(19, REQUEST | ACK, {"index": 12}, [("IFLA_GROUP", 0x40000001)]),
    ),
    "delete a group": (
        messages.delete_group(0x40000001),
        lambda: link(17, REQUEST | ACK, {}, [("IFLA_GROUP", 0x40000001)]),
    ),
    "delete by index": (messages.delete_link(12), lambda: link(17, REQUEST | ACK, {"index": 12}, [])),
    "delete by name": (
        messages.delete_link_named("eth0"),
        lambda: link(17, REQUEST | ACK, {}, [("IFLA_IFNAME", "eth0")]),
    ),
    "add an address": (
        messages.add_address(2, "eth0", POD),
        lambda: address(20, CREATE | EXCL, [("IFA_LOCAL", "10.0.1.7"), ("IFA_ADDRESS", "10.0.1.7")]),
    ),
    "add an IPv6 address": (
        messages.add_address(2, "eth0", IPv6Address("fd00::7")),
        lambda: address(
            20,
            CREATE | EXCL,
            [("IFA_LOCAL", "fd00::7"), ("IFA_ADDRESS", "fd00::7")],
            {"family": 10, "prefixlen": 128, "flags": 0x02},  # IFA_F_NODAD
        ),
    ),
    "remove an address": (
        messages.delete_address(2, "cilium_host", IPv4Interface("10.0.1.7/32")),
        lambda: address(21, 0, [("IFA_LOCAL", "10.0.1.7")]),
    ),
    "list addresses": (
        messages.dump_addresses(),
        lambda: filled(ifaddrmsg(), 22, REQUEST | ACK | DUMP, {}, []),
    ),
    "remove an IPv6 address": (
        messages.delete_address(2, "cilium_host", IPv6Interface("fd00::7/64")),
        lambda: address(21, 0, [("IFA_LOCAL", "fd00::7")], {"family": 10, "prefixlen": 64}),
    ),
    "list IPv6 routes": (
        messages.dump_routes(messages.AF_INET6),
        lambda: filled(rtmsg(), 26, REQUEST | ACK | DUMP, {"family": 10}, []),
    ),
    "route of the IPv6 pod CIDR": (
        messages.add_route(3, IPv6Network("fd00:1::/112"), source=IPv6Address("fd00:1::5"), replace=True),
        lambda: route(
            CREATE | REPLACE,
            112,
            253,
            [("RTA_DST", "fd00:1::"), ("RTA_PREFSRC", "fd00:1::5"), ("RTA_OIF", 3)],
            family=10,
        ),
    ),
    "route to the pods of another node": (
        messages.add_route(
            3, IPv4Network("10.0.2.0/24"), via=ROUTER, source=ROUTER, mtu=1450, replace=True, protocol=2
        ),
        lambda: route(
            CREATE | REPLACE,
            24,
            0,
            [
                ("RTA_DST", "10.0.2.0"),
                ("RTA_GATEWAY", "10.0.1.5"),
                ("RTA_PREFSRC", "10.0.1.5"),
                ("RTA_OIF", 3),
                ("RTA_METRICS", {"attrs": [("RTAX_MTU", 1450)]}),
            ],
            proto=2,
        ),
    ),
    "remove the route to the pods of another node": (
        messages.delete_route(3, IPv4Network("10.0.2.0/24"), 2),
        lambda: filled(
            rtmsg(),
            25,
            REQUEST | ACK,
            {"family": 2, "dst_len": 24, "table": 254, "proto": 2, "scope": 255},
            [("RTA_DST", "10.0.2.0"), ("RTA_OIF", 3)],
        ),
    ),
    "remove an IPv6 route": (
        messages.delete_route(3, IPv6Network("fd00:1::/112")),
        lambda: filled(
            rtmsg(),
            25,
            REQUEST | ACK,
            {"family": 10, "dst_len": 112, "table": 254, "scope": 255},
            [("RTA_DST", "fd00:1::"), ("RTA_OIF", 3)],
        ),
    ),
    "neighbour of a pod": (
        messages.set_neighbour(7, IPv4Address("10.0.1.77"), bytes.fromhex("02aabbccddee")),
        lambda: filled(
            ndmsg(),
            28,
            REQUEST | ACK | CREATE | REPLACE,
            {"family": 2, "ifindex": 7, "state": 0x80},
            [("NDA_DST", "10.0.1.77"), ("NDA_LLADDR", "02:aa:bb:cc:dd:ee")],
        ),
    ),
    "IPv6 neighbour of a pod": (
        messages.set_neighbour(7, IPv6Address("fd00::77"), bytes.fromhex("02aabbccddee")),
        lambda: filled(
            ndmsg(),
            28,
            REQUEST | ACK | CREATE | REPLACE,
            {"family": 10, "ifindex": 7, "state": 0x80},
            [("NDA_DST", "fd00::77"), ("NDA_LLADDR", "02:aa:bb:cc:dd:ee")],
        ),
    ),
    "route to the gateway": (
        messages.add_route(2, IPv4Network("10.0.1.5/32")),
        lambda: route(CREATE | EXCL, 32, 253, [("RTA_DST", "10.0.1.5"), ("RTA_OIF", 2)]),
    ),
    "route to the IPv6 gateway": (
        messages.add_route(2, IPv6Network("fd00::5/128")),
        lambda: route(CREATE | EXCL, 128, 253, [("RTA_DST", "fd00::5"), ("RTA_OIF", 2)], family=10),
    ),
    "IPv6 default route": (
        messages.add_route(2, IPv6Network("::/0"), via=IPv6Address("fd00::5"), mtu=1450),
        lambda: route(
            CREATE | EXCL,
            0,
            0,
            [("RTA_GATEWAY", "fd00::5"), ("RTA_OIF", 2), ("RTA_METRICS", {"attrs": [("RTAX_MTU", 1450)]})],
            family=10,
        ),
    ),
    "default route": (
        messages.add_route(2, IPv4Network("0.0.0.0/0"), via=ROUTER, mtu=1450),
        lambda: route(
            CREATE | EXCL,
            0,
            0,
            [("RTA_GATEWAY", "10.0.1.5"), ("RTA_OIF", 2), ("RTA_METRICS", {"attrs": [("RTAX_MTU", 1450)]})],
        ),
    ),
    "route of the pod CIDR": (
        messages.add_route(3, IPv4Network("10.0.1.0/24"), via=ROUTER, source=ROUTER, replace=True),
        lambda: route(
            CREATE | REPLACE,
            24,
            0,
            [
                ("RTA_DST", "10.0.1.0"),
                ("RTA_GATEWAY", "10.0.1.5"),
                ("RTA_PREFSRC", "10.0.1.5"),
                ("RTA_OIF", 3),
            ],
        ),
    ),
    "list the routes of a link": (
        messages.dump_routes(0, 3),
        lambda: filled(rtmsg(), 26, REQUEST | ACK | DUMP, {"family": 0}, [("RTA_OIF", 3)]),
    ),
    "remove a route": (
        messages.delete_route(3, IPv4Network("10.0.1.5/32")),
        lambda: filled(
            rtmsg(),
            25,
            REQUEST | ACK,
            {"family": 2, "dst_len": 32, "table": 254, "scope": 255},
            [("RTA_DST", "10.0.1.5"), ("RTA_OIF", 3)],
        ),
    ),
    "clsact": (
        messages.add_clsact(12),
        lambda: tc(36, CREATE, {"handle": 0xFFFF0000, "parent": 0xFFFFFFF1}, [("TCA_KIND", "clsact")]),
    ),
    "ingress filter": (
        messages.replace_filter(12, messages.TC_H_INGRESS, 33, "cil_from_container"),
        lambda: bpf_filter(0xFFFFFFF2),
    ),
    "take off a filter": (
        messages.delete_filter(12, messages.TC_H_EGRESS),
        lambda: tc(
            45,
            0,
            {"handle": 1, "parent": 0xFFFFFFF3, "info": 1 << 16 | 0x0300},
            [("TCA_KIND", "bpf")],
        ),
    ),
    "list filters": (
        messages.dump_filters(12, messages.TC_H_INGRESS),
        lambda: tc(46, DUMP, {"parent": 0xFFFFFFF2}, []),
    ),
    "egress filter": (
        messages.replace_filter(12, messages.TC_H_EGRESS, 33, "cil_from_container"),
        lambda: bpf_filter(0xFFFFFFF3),
    ),
}


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name in CASES])
def test_a_message_is_what_pyroute2_would_send(case: str) -> None:
    request, oracle = CASES[case]
    assert encode([request], 7, acknowledge=True).hex(" ", 4) == oracle().hex(" ", 4)


def test_every_packer_is_compared() -> None:
    packers = {
        name
        for name, value in vars(messages).items()
        if callable(value) and getattr(value, "__annotations__", {}).get("return") is Request
    }
    compared = {
        "create_veth", "get_link", "get_link_at", "sync_carrier", "set_mac", "replace_route",
            "dump_links", "activate_link", "link_up", "set_device",
        "set_group", "delete_group", "delete_link", "delete_link_named", "add_address", "delete_address",
        "dump_addresses", "dump_routes", "add_route", "delete_route", "add_clsact", "replace_filter",
        "set_neighbour", "set_mtu", "set_offloads",
        "dump_filters", "delete_filter", "set_xdp",
    }  # fmt: skip
    assert packers == compared


def test_pyroute2_reads_our_message_back() -> None:
    read = ifinfmsg(encode([messages.create_veth(PAIR)], 7))
    read.decode()
    assert isinstance(read, nlmsg)
    assert read.get_attr("IFLA_IFNAME") == "lxc0123456789ab"
    peer = read.get_nested("IFLA_LINKINFO", "IFLA_INFO_DATA", "VETH_INFO_PEER")
    assert peer.get_attr("IFLA_IFNAME") == "eth0"
    assert peer.get_attr("IFLA_NET_NS_FD") == 9
