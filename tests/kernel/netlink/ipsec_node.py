"""A node with only IPsec's cells: policies, rules and routes are the kernel's, XFRM states a fake's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import lifecycle
from cells import config
from cells.base.addresses import IPAddress
from cells.cluster.encryption import PublishedKey
from cells.cluster.ipcache.rows import Source
from cells.cluster.node_ids import NodeAddressID
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.encryption.ipsec import reconciler
from cells.encryption.ipsec.plan import XfrmEdge
from cells.encryption.ipsec.reconciler import KernelIpsec
from cells.maps.map import MapSpec, MapType
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey
from cells.netlink.connection import NetlinkError
from cells.netlink.xfrm import XfrmState
from cells.node.devices import Device
from cells.node.router import Router
from cells.tunnel.settings import RouteMtu
from lifecycle import Hive, ReadTable, Settings, Table, Tables, provide, replace, supply
from lifecycle.testing import fake, started
from tests.support.fake_map import FakeMap
from tests.unit.encryption.fakes import FakeXfrm

KEY = "3+ rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128\n"
NEXT_KEY = "4+ rfc4106(gcm(aes)) 0102030405060708090a0b0c0d0e0f1011121314 128\n"


def node(number: int, *, local: bool = False) -> ClusterNode:
    """Return a dual-stack node with a pod CIDR of each family."""
    return ClusterNode(
        cluster="default",
        name=f"n{number}",
        source=Source.LOCAL if local else Source.CUSTOM_RESOURCE,
        addresses=(
            *(NodeIP(INTERNAL_IP, ip_address(ip)) for ip in (f"192.0.2.{number}", f"2001:db8::{number}")),
            *(NodeIP(CILIUM_INTERNAL_IP, ip_address(ip)) for ip in (f"10.0.{number}.1", f"fd00::{number}:1")),
        ),
        ipv4_alloc_cidrs=(ip_network(f"10.0.{number}.0/24"),),
        ipv6_alloc_cidrs=(ip_network(f"fd00::{number}:0/112"),),
        boot_id=f"11111111-1111-4111-8111-{number:012}",
    )


class EspKernel(KernelIpsec):
    """The test machine's kernel as one with ESP, which it may lack."""

    def __init__(self) -> None:
        self.esp = FakeXfrm()
        self.published = PublishedKey(Tables())
        self.added: set[tuple[int, int]] = set()
        """SPIs of states, each with the published key number at the time it was added."""

    async def states(self) -> list[XfrmState]:
        return await self.esp.states()

    async def add_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]:
        self.added |= {(one.spi, self.published.number) for one in states}
        return await self.esp.add_states(states)

    async def delete_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]:
        return await self.esp.delete_states(states)


class WorldSettings(Settings, frozen=True):
    """Settings of another cell."""

    ipam: str = "cluster-pool"


class IpsecWorld:
    """The other parts of an agent, as the cells see them."""

    def __init__(self, *, tunnelled: bool = False, kernel: KernelIpsec | None = None) -> None:
        self.nodes: Table[str, ClusterNode] = Table("nodes", key=lambda one: one.full_name)
        self.numbers: Table[IPAddress, NodeAddressID] = Table("node-ids", key=lambda one: one.ip)
        self.devices: Table[int, Device] = Table("devices", key=lambda one: one.ifindex)
        self.all_known = self.nodes.initializer("nodes")
        self.number = FakeMap[bytes, bytes](MapSpec("cilium_encrypt_state", MapType.ARRAY, 4, 1, 1))
        self.number.update(bytes(4), bytes(1))
        size = IpcacheKey.SIZE
        self.networks = FakeMap[bytes, bytes](MapSpec("hive_pod_networks", MapType.LPM_TRIE, size, 1, 64))
        self.esp = EspKernel()
        self.kernel = kernel or self.esp
        self.tunnelled = tunnelled

    def route_mtu(self) -> RouteMtu:
        return fake(RouteMtu, tunnelled=self.tunnelled, tunnel_link="cilium_vxlan", encrypted=lambda: 1400)

    def router(self) -> Router:
        return fake(Router, endpoint_routes=False)

    def maps(self) -> Maps:
        return fake(Maps, encrypt_state=self.number, pod_networks=self.networks, use=lambda *_, **__: None)

    def pod_networks(self) -> dict[str, int]:
        """Return the pod networks in the programs' map: 1 for remote pods."""
        return {str(IpcacheKey.unpack(key).network): value[0] for key, value in self.networks.items()}

    def add(self, *nodes: ClusterNode) -> None:
        with self.numbers.txn() as numbers:
            for one in nodes:
                if not one.local:
                    for each in one.addresses:
                        numbers.put(NodeAddressID(each.ip, int(one.name[1:]), one.full_name))
        with self.nodes.txn() as txn:
            for one in nodes:
                txn.put(one)

    def add_device(self, name: str, ifindex: int, *addresses: str) -> None:
        row = Device(ifindex, name, "", bytes(6), 1500, True, tuple(map(ip_interface, addresses)))
        with self.devices.txn() as txn:
            txn.put(row)

    @asynccontextmanager
    async def agent(self, **settings: str) -> AsyncIterator[Hive]:
        """Run IPsec's cells."""
        world = (
            lifecycle.config(WorldSettings),
            supply(self.nodes, type=ReadTable[str, ClusterNode]),
            supply(self.numbers, type=ReadTable[IPAddress, NodeAddressID]),
            supply(self.devices, type=Table[int, Device]),
            provide(self.route_mtu, self.router, self.maps),
            replace(RouteMtu, self.route_mtu()),
            replace(Router, self.router()),
            replace(Maps, self.maps()),
        )
        pools = {"cluster-pool-ipv4-cidr": "10.0.0.0/8", "cluster-pool-ipv6-cidr": "fd00::/104"}
        given = {"enable-ipv4": "true", "enable-ipv6": "true", **pools, **settings}
        cells = (reconciler.cell, config.cell, *world, replace(XfrmEdge, self.kernel))
        async with started(*cells, settings=given) as hive:
            yield hive


def key_file(folder: Path, text: str, version: str = "first") -> Path:
    """Write a key file as a Secret's volume does: links to a folder that is replaced atomically."""
    (folder / version).mkdir()
    (folder / version / "keys").write_text(text)
    link = folder / "..new"
    link.symlink_to(version)
    link.rename(folder / "..data")
    path = folder / "keys"
    if not path.is_symlink():
        path.symlink_to("..data/keys")
    return path
