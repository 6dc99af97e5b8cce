"""The router's kernel objects: differences are found and corrected in order, stale ones removed."""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_interface, ip_network

import anyio
import pytest
import structlog
from msgspec.structs import replace

from cells.base.addresses import IPAddress, IPNetwork
from cells.maps.records.endpoints import NodeConfig
from cells.netlink.rows import RouteInfo
from cells.node.router_kernel import RouterKernel, RouterObject, router_objects
from lifecycle import BatchError, Reconciler, Table
from lifecycle.tables import ReconcileError
from tests.unit.router.fakes import HOST, NET, FakeLinks

pytestmark = pytest.mark.anyio

ROUTER, PODS = IPv4Address("10.0.1.5"), IPv4Network("10.0.1.0/24")
ROUTER6, PODS6 = IPv6Address("fd00:1::5"), IPv6Network("fd00:1::/112")
BOTH: dict[IPAddress, IPNetwork] = {ROUTER6: PODS6, ROUTER: PODS}


class FakePrograms:
    """Records its calls, and where it is attached."""

    def __init__(self) -> None:
        self.node: NodeConfig | None = None
        self.attached: tuple[int, int] | None = None

    def set_node(self, node: NodeConfig) -> None:
        self.node = node

    def has_node(self, node: NodeConfig) -> bool:
        return self.node == node

    def known_node(self) -> NodeConfig | None:
        return self.node

    def attach_host(self, ifindex_host: int, ifindex_net: int) -> None:
        self.attached = (ifindex_host, ifindex_net)

    def serves_host(self, ifindex_host: int, ifindex_net: int) -> bool:
        return self.attached == (ifindex_host, ifindex_net)


class World:
    """A node with a router of both families; ``run()`` makes it right once."""

    def __init__(self, links: FakeLinks, outside_pods: tuple[IPAddress, ...] = (), mtu: int = 1500) -> None:
        self.links = links
        self.programs = FakePrograms()
        self.settings = 0
        self.kernel = RouterKernel(links, self.programs, structlog.get_logger(), write_settings=self._count)
        self.table: Table[str, RouterObject] = Table("router", key=lambda row: row.key)
        with self.table.txn() as rows:
            for row in router_objects(BOTH, outside_pods, mtu).values():
                rows.put(row)

    def _count(self) -> None:
        self.settings += 1

    async def run(self) -> list[str]:
        """What was asked of the links."""
        self.links.done.clear()
        await Reconciler(self.table, self.kernel, full_every=3600.0).sweep()
        return list(self.links.done)


COMPLETE = [
    "add fd00:1::5",
    "add 10.0.1.5",
    "route fd00:1::/112 via None src fd00:1::5",
    "route 10.0.1.5/32 via None src None",
    "route 10.0.1.0/24 via 10.0.1.5 src 10.0.1.5",
]


async def test_everything_is_made_in_order_and_then_nothing_is_touched() -> None:
    world = World(FakeLinks())
    assert await world.run() == ["create", "set cilium_host 1500", "set cilium_net 1500", *COMPLETE]
    assert world.programs.attached == (12, 13)
    assert world.programs.node is not None
    assert (world.programs.node.router_ip6, world.programs.node.pod_cidr) == (ROUTER6, PODS)
    assert world.settings > 0
    assert await world.run() == []


async def test_a_pair_that_went_is_made_with_its_macs_and_all_that_was_on_it() -> None:
    world = World(FakeLinks())
    await world.run()
    node_config = world.programs.node
    assert node_config is not None
    world.links.found.clear()
    world.links.present.clear()
    world.links.routed.clear()
    assert (await world.run())[3:] == COMPLETE
    assert (world.links.found["cilium_host"].mac, world.links.found["cilium_net"].mac) == (
        node_config.host_mac,
        node_config.net_mac,
    )


def _another_source(links: FakeLinks) -> None:
    links.routed = [each._replace(source=None) for each in links.routed]


def _no_address(links: FakeLinks) -> None:
    links.present[12] = [each for each in links.present[12] if each.version == 4]


def _down(links: FakeLinks) -> None:
    links.found["cilium_net"] = replace(links.found["cilium_net"], up=False)


def _other_route(links: FakeLinks) -> None:
    links.routed.append(RouteInfo(12, ip_network("192.0.2.0/24"), None, None, by_kernel=False))


@pytest.mark.parametrize(
    ("damage", "healed"),
    [
        (_another_source, [COMPLETE[2], COMPLETE[4]]),
        (_no_address, ["add fd00:1::5"]),
        (_down, ["set cilium_net 1500"]),
        (_other_route, ["unroute 192.0.2.0/24"]),
    ],
    ids=["source of routes", "address", "down", "a route of another owner"],
)
async def test_only_what_is_wrong_is_made_right(
    damage: Callable[[FakeLinks], None], healed: list[str]
) -> None:
    world = World(FakeLinks())
    await world.run()
    damage(world.links)
    assert await world.run() == healed
    assert await world.run() == []


async def test_changed_programs_and_node_addresses_are_written_again() -> None:
    world = World(FakeLinks())
    await world.run()
    node_config = world.programs.node
    vars(world.programs).update(node=None, attached=None)
    assert await world.run() == []
    assert (world.programs.node, world.programs.attached) == (node_config, (12, 13))


async def test_a_new_address_is_there_before_the_old_ones_go() -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [ip_interface("10.0.0.9/32"), ip_interface("10.0.1.5/24")]
    done = await World(links).run()
    assert done == [*COMPLETE, "remove 10.0.0.9/32", "remove 10.0.1.5/24"]


async def test_what_the_kernel_gave_the_device_stays() -> None:
    links = FakeLinks(HOST, NET)
    links.present = {2: [ip_interface("fe80::1/64")], 7: [ip_interface("192.0.2.1/24")]}
    links.routed = [RouteInfo(2, ip_network("fe80::/64"), None, None, by_kernel=True)]
    await World(links).run()
    assert links.present[2][0] == ip_interface("fe80::1/64")
    assert links.present[7] == [ip_interface("192.0.2.1/24")]
    assert links.routed[0].destination == ip_network("fe80::/64")


async def test_pods_outside_of_the_range_have_a_route_each() -> None:
    links = FakeLinks(HOST, NET)
    outside_pods = (IPv4Address("10.9.0.7"), IPv6Address("fd00:9::7"))
    links.routed = [RouteInfo(2, ip_network("10.9.0.8/32"), ROUTER, ROUTER, by_kernel=False)]
    done = await World(links, outside_pods).run()
    assert done[5:] == [
        "route 10.9.0.7/32 via 10.0.1.5 src 10.0.1.5",
        "route fd00:9::7/128 via None src fd00:1::5",
        "unroute 10.9.0.8/32",
    ]


async def test_an_address_that_cannot_be_removed_is_the_only_failure() -> None:
    links = FakeLinks(HOST, NET)
    links.present[2] = [ip_interface("10.0.0.9/32")]
    links.fast = True
    with pytest.raises(ReconcileError) as caught:
        await World(links).run()
    assert [(key, str(why)) for key, why in caught.value.failures.items()] == [
        ("address 10.0.0.9/32", "remove address 10.0.0.9/32 from cilium_host: Device or resource busy")
    ]
    assert links.done == COMPLETE


async def test_without_the_cilium_host_pair_each_object_reports_it() -> None:
    world = World(FakeLinks())
    batch = {key: row for key, row in router_objects(BOTH, (), 1500).items() if key.startswith("address")}
    with pytest.raises(BatchError) as caught:
        await world.kernel.put(batch)
    assert {str(why) for why in caught.value.failures.values()} == {
        "cilium_host is missing, or is not one end of the agent's veth pair"
    }
    await anyio.lowlevel.checkpoint()
