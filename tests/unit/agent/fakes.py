"""The agent's hive with fakes in place of the kernel and the network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from cells.cluster.host_ip_sync import HostIPSync
from cells.cluster.identity import KernelNumbers
from cells.cluster.ipcache.rows import IpcacheTarget
from cells.config import AgentConfig
from cells.datapath import DatapathWatchdog
from cells.datapath.collector import Collected, ConntrackCollector
from cells.datapath.datapath import Datapath, HostPolicy
from cells.encryption.ipsec.plan import XfrmEdge
from cells.encryption.wireguard.device import WireguardDevice
from cells.endpoint import EndpointMaps, EndpointPrograms
from cells.endpoint.host import HostPrograms
from cells.endpoint.restore import PreviousAgent, StaleMaps
from cells.endpoint.watchdog import EndpointWatchdog
from cells.maps import MapWatchdog
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.records.cluster import TunnelConfig
from cells.masquerade import Masquerade
from cells.netlink.links import HostLinks
from cells.netlink.messages import OffloadLimits
from cells.netlink.rows import LinkInfo, Offloads
from cells.node.devices import Device, Kernel
from cells.node.local_addresses import LxcTarget
from cells.node.router import Router
from cells.policy.maps import PolicyMapPool
from cells.proxy.dns.port import ProxyPort, ProxyRoutes
from cells.services.sockets import SocketHooks
from cells.tunnel.kernel import TunnelMaps, TunnelNetwork, TunnelRoute
from lifecycle import Cell, replace
from lifecycle.testing import fake
from tests.support.fake_map import SPECS, FakeMap
from tests.support.ports import free_port
from tests.unit.endpoint.fakes import FakeKernel
from tests.unit.endpoint_restore.fakes import FakeLeft
from tests.unit.local_addresses.fakes import FakeLxcMap

T = TypeVar("T")
REPLACED = {
    *(AgentConfig, Datapath, DatapathWatchdog, EndpointWatchdog, HostIPSync, HostLinks),
    *(Masquerade, Maps, MapWatchdog, PolicyMaps, Router),
}


class Config(AgentConfig):
    """Paths below a test's directory; no lock on the node is taken."""

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory
        self.state = directory / "state"
        self.bpf_root = directory / "bpf"
        self.globals_dir = self.bpf_root / "tc" / "globals"
        self.delete_queue = directory / "deleteQueue"
        self.api_socket = directory / "cilium.sock"
        self.cni_socket = directory / "cni.sock"
        self.cluster_name = "default"
        self.mtu = 0
        self.debug = False
        for made in (self.state, self.delete_queue):
            made.mkdir(exist_ok=True)


def untouched(kind: type[T]) -> T:
    """Return an object of the type without its constructor, only to be injected."""
    return kind.__new__(kind)


@asynccontextmanager
async def quiet() -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Simulate devices that never change."""
    yield anyio.sleep_forever


async def nothing_ended() -> tuple[Collected, ...]:
    """Simulate conntrack maps without connections."""
    return ()


def any_maps(*attributes: str, both_families: bool = False) -> None:
    """Accept any request for maps, which nothing reads."""


async def no_link(name: str) -> None:
    """Simulate a node without a tunnel device."""
    del name


async def none_listed() -> list[Any]:
    """Simulate a kernel without IPsec states and policies."""
    return []


async def none_removed() -> int:
    """Simulate a kernel without IPsec routes."""
    return 0


async def no_routes(name: str) -> list[TunnelRoute]:
    """Simulate a node without routes to other nodes."""
    del name
    return []


async def there() -> None:
    """Report the DNS proxy's routes as installed."""


class NoHostPolicy:
    """Programs of a node without host policy."""

    host_policy = HostPolicy()

    def set_host_policy(self, policy: HostPolicy) -> None:
        """Check that no policy is set."""
        assert policy == HostPolicy()


def nothing() -> None:
    """Close or remove nothing."""


def fakes(directory: Path, kernel: FakeKernel, links: HostLinks) -> list[Cell]:
    """Replace every part of the agent that uses a kernel."""
    eth0 = Device(2, "eth0", "", bytes(6), 1500, True, (IPv4Interface("192.0.2.7/24"),))
    return [
        replace(AgentConfig, Config(directory)),
        replace(Kernel, fake(Kernel, devices=lambda: [eth0], subscribed=quiet)),
        replace(HostLinks, links),
        replace(ConntrackCollector, fake(ConntrackCollector, collect=nothing_ended)),
        replace(EndpointMaps, kernel),
        replace(EndpointPrograms, kernel),
        replace(PolicyMapPool, kernel),
        replace(KernelNumbers, fake(KernelNumbers, read=tuple)),
        replace(HostPrograms, NoHostPolicy()),
        replace(StaleMaps, FakeLeft(kernel)),
        replace(PreviousAgent, FakeLeft(kernel)),
        replace(IpcacheTarget, kernel.prefixes.target),
        replace(LxcTarget, FakeLxcMap().target),
        replace(TunnelNetwork, fake(TunnelNetwork, find=no_link, routes=no_routes)),
        replace(TunnelMaps, fake(TunnelMaps, facts=TunnelConfig)),
        replace(
            XfrmEdge, fake(XfrmEdge, states=none_listed, policies=none_listed, remove_routes=none_removed)
        ),
        replace(SocketHooks, fake(SocketHooks, detach_all=list, close=nothing)),
        replace(Router, fake(Router, addressing=dict)),
        replace(WireguardDevice, fake(WireguardDevice, remove=nothing)),
        replace(
            ProxyRoutes,
            fake(ProxyRoutes, installed=there, port=fake(ProxyPort, port=10000, families=[]), enabled=True),
        ),
        *(replace(kind, untouched(kind)) for kind in REPLACED - {AgentConfig, HostLinks, Maps, Router}),
        replace(
            Maps,
            fake(
                Maps,
                use=any_maps,
                **{name: FakeMap(SPECS[name]) for name in ("nodes", "tunnels", "encryption")},
            ),
        ),
    ]


def with_links(*links: LinkInfo) -> HostLinks:
    """Return a node with these links."""
    offloads = Offloads(OffloadLimits(), 524280)
    return fake(HostLinks, links=lambda without=(): [*links], offloads=lambda _: offloads)


def without_links() -> HostLinks:
    """Return a node without pods."""
    return with_links()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """Return an agent's settings that do not collide with other agents."""
    return {
        "ipv4-range": "10.0.1.0/24",
        "routing-mode": "native",
        "agent-health-port": free_port(),
        "write-cni-conf-when-ready": str(tmp_path / "net.d" / "05-cilium.conflist"),
    }
