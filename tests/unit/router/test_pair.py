"""cilium_host and cilium_net: made, repaired, and left alone when they are right."""

from collections.abc import Iterable
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface, ip_network

import pytest
import structlog
from structlog.testing import capture_logs

from cells.netlink import CreatedLink, IPAddress, IPInterface, IPNetwork, LinkInfo, NetlinkError, VethPair
from cells.router.pair import ensure_pair, set_addresses
from lifecycle import Logger

pytestmark = pytest.mark.anyio

ROUTER, PODS = IPv4Address("10.0.1.5"), IPv4Network("10.0.1.0/24")
ROUTER6, PODS6 = IPv6Address("fd00:1::5"), IPv6Network("fd00:1::/112")


def link(ifindex: int, name: str, peer: int) -> LinkInfo:
    """One end of a pair that is as the router wants it."""
    return LinkInfo(
        ifindex=ifindex,
        name=name,
        mac=bytes(6),
        mtu=1500,
        kind="veth",
        alias="",
        up=True,
        arp=False,
        peer_ifindex=peer,
        link_netnsid=None,
        group=0,
        tx_queue_length=1000,
    )


HOST, NET = link(2, "cilium_host", 3), link(3, "cilium_net", 2)


class FakeLinks:
    """Keeps links and addresses; ``done`` tells what was asked of it."""

    def __init__(self, *links: LinkInfo) -> None:
        self.found = {each.name: each for each in links}
        self.present: dict[int, list[IPInterface]] = {}
        self.routed: list[IPNetwork] = []
        self.done: list[str] = []
        self.fast = False

    def find(self, name: str) -> LinkInfo | None:
        return self.found.get(name)

    def create_veth(self, pair: VethPair) -> CreatedLink:
        assert not {pair.host_name, pair.pod_name} & self.found.keys()
        self.done.append("create")
        host, net = link(12, pair.host_name, 13), link(13, pair.pod_name, 12)
        for end, mac in ((host, pair.host_mac), (net, pair.pod_mac)):
            self.found[end.name] = replace(end, mac=mac, mtu=pair.mtu, up=False, arp=True)
        return CreatedLink(12, 13)

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        assert self.found[name].ifindex == ifindex
        self.done.append(f"set {name} {mtu}")
        self.found[name] = replace(self.found[name], mtu=mtu, up=True, arp=False, tx_queue_length=1000)

    def addresses(self) -> dict[int, list[IPInterface]]:
        return {ifindex: list(addresses) for ifindex, addresses in self.present.items()}

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        self.done.append(f"add {address}")
        self.present.setdefault(ifindex, []).append(ip_interface(address))

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        if self.fast:
            raise NetlinkError(16, f"remove address {address} from {name}")
        self.done.append(f"remove {address}")
        self.present[ifindex].remove(address)

    def set_routes(self, ifindex: int, gateway: IPAddress, network: IPNetwork) -> None:
        self.done.append(f"route {network} via {gateway}")

    def routes(self, ifindex: int) -> list[IPNetwork]:
        return list(self.routed)

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        self.done.append(f"unroute {network}")

    async def reap(self, ifindexes: Iterable[int]) -> None:
        gone = set(ifindexes)
        self.done.extend(f"delete {each.name}" for each in self.found.values() if each.ifindex in gone)
        self.found = {name: each for name, each in self.found.items() if each.ifindex not in gone}


@pytest.fixture
def log() -> Logger:
    logger: Logger = structlog.get_logger()
    return logger


async def test_the_pair_is_created_up_and_without_arp(log: Logger) -> None:
    links = FakeLinks()
    pair = await ensure_pair(links, 1450, log)
    assert links.done == ["create", "set cilium_host 1450", "set cilium_net 1450"]
    assert (pair.host.ifindex, pair.net.ifindex) == (12, 13)
    assert pair.host.mac != pair.net.mac


async def test_a_pair_that_is_right_is_not_touched(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    pair = await ensure_pair(links, 1500, log)
    assert links.done == []
    assert (pair.host, pair.net) == (HOST, NET)


async def test_a_pair_that_differs_is_changed_in_place(log: Logger) -> None:
    for wrong in (replace(HOST, up=False), replace(HOST, arp=True), replace(HOST, tx_queue_length=500)):
        links = FakeLinks(wrong, NET)
        await ensure_pair(links, 1500, log)
        assert links.done == ["set cilium_host 1500"]


@pytest.mark.parametrize(
    ("links", "deleted"),
    [
        ((HOST,), ["cilium_host"]),
        ((NET,), ["cilium_net"]),
        ((replace(HOST, kind="dummy", peer_ifindex=0), NET), ["cilium_host", "cilium_net"]),
        ((replace(HOST, peer_ifindex=9), NET), ["cilium_host", "cilium_net"]),
        ((replace(HOST, link_netnsid=0), NET), ["cilium_host", "cilium_net"]),
    ],
    ids=["net missing", "host missing", "no veth", "other peers", "peer in another namespace"],
)
async def test_what_is_no_pair_is_made_anew(
    links: tuple[LinkInfo, ...], deleted: list[str], log: Logger
) -> None:
    fake = FakeLinks(*links)
    pair = await ensure_pair(fake, 1500, log)
    assert fake.done[: len(deleted) + 1] == [*(f"delete {name}" for name in deleted), "create"]
    assert pair.host.ifindex == 12


def test_a_new_address_is_there_before_the_old_ones_go(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [ip_interface("10.0.0.9/32"), ip_interface("10.0.1.5/24")]
    set_addresses(links, 2, {ROUTER: PODS}, (), log)
    assert links.done == [
        "add 10.0.1.5",
        "route 10.0.1.0/24 via 10.0.1.5",
        "remove 10.0.0.9/32",
        "remove 10.0.1.5/24",
    ]


def test_an_address_that_is_there_stays(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    links.present = {2: [ip_interface("10.0.1.5/32")], 7: [ip_interface("192.0.2.1/24")]}
    set_addresses(links, 2, {ROUTER: PODS}, (), log)
    assert links.done == ["route 10.0.1.0/24 via 10.0.1.5"]
    assert links.present[7] == [ip_interface("192.0.2.1/24")]


def test_each_family_has_one_address_and_link_local_ones_stay(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [*map(ip_interface, ("10.0.1.5/32", "fd00:9::5/128", "fe80::1/64"))]
    links.routed = [IPv6Network(each) for each in ("fd00:9::/112", "fd00:1::/112", "fd00:1::5", "fe80::/64")]
    set_addresses(links, 2, {ROUTER6: PODS6, ROUTER: PODS}, (), log)
    assert links.done == [
        "add fd00:1::5",
        "route fd00:1::/112 via fd00:1::5",
        "route 10.0.1.0/24 via 10.0.1.5",
        "remove fd00:9::5/128",
        "unroute fd00:9::/112",
    ]


def test_a_family_that_is_off_leaves_nothing_behind(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [*map(ip_interface, ("10.0.1.5/32", "fd00:1::5/128"))]
    links.routed = [PODS6]
    set_addresses(links, 2, {ROUTER: PODS}, (), log)
    assert links.done[1:] == ["remove fd00:1::5/128", "unroute fd00:1::/112"]


def test_pods_outside_of_the_range_have_a_route_each_as_long_as_they_are_there(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [*map(ip_interface, ("10.0.1.5/32", "fd00:1::5/128"))]
    links.routed = [*map(ip_network, ("10.0.1.5/32", "10.9.0.7/32", "10.9.0.8/32", "fd00:1::5/128"))]
    strays = [*map(ip_address, ("10.9.0.7", "fd00:9::7"))]
    set_addresses(links, 2, {ROUTER6: PODS6, ROUTER: PODS}, strays, log)
    assert links.done == [
        "route fd00:1::/112 via fd00:1::5",
        "route 10.0.1.0/24 via 10.0.1.5",
        "route 10.9.0.7/32 via 10.0.1.5",
        "route fd00:9::7/128 via fd00:1::5",
        "unroute 10.9.0.8/32",
    ]


def test_an_old_address_that_cannot_be_removed_is_logged_and_no_more(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [ip_interface("10.0.0.9/32")]
    links.fast = True
    with capture_logs() as logs:
        set_addresses(links, 2, {ROUTER: PODS}, (), log)
    assert [(entry["log_level"], entry["error"]) for entry in logs] == [
        ("error", "remove address 10.0.0.9/32 from cilium_host: Device or resource busy")
    ]
