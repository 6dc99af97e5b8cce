"""The agent over fakes, without a kernel: in order whatever siblings do, and clean whichever hook fails.

The same over the real kernel is in tests/kernel/agent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio
import pytest
import structlog

from cells.agent import agent
from cells.cluster.host_ip_sync import HostIPSync
from cells.cluster.ipcache.rows import IpcacheTarget
from cells.config import AgentConfig
from cells.datapath import DatapathWatchdog
from cells.datapath.collector import Collected, ConntrackCollector
from cells.datapath.datapath import Datapath, HostPolicy
from cells.encryption.ipsec.plan import XfrmEdge
from cells.encryption.wireguard.device import WireguardDevice
from cells.endpoint import EndpointMaps, EndpointPrograms, Endpoints, StateFiles
from cells.endpoint.host import HostPrograms
from cells.endpoint.restore import PreviousAgent, StaleMaps
from cells.endpoint.watchdog import EndpointWatchdog
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.records.cluster import TunnelConfig
from cells.maps.watchdog import MapWatchdog
from cells.masquerade import Masquerade
from cells.netlink.links import HostLinks
from cells.node.devices import Device, Kernel
from cells.node.local_addresses import LxcTarget
from cells.node.router import Router
from cells.policy.maps import PolicyMapPool
from cells.proxy.dns.port import ProxyPort, ProxyRoutes
from cells.services.sockets import SocketHooks
from cells.tunnel.kernel import TunnelLinks, TunnelMaps, TunnelRoute, TunnelRoutes
from lifecycle import Cell, Modules, replace
from lifecycle.testing import Recorder, VirtualClock, fail_each_hook, fake, started
from tests.support.agent_order import ORDER
from tests.support.fake_map import SPECS, FakeMap
from tests.support.points import EVERY, each_hook
from tests.support.ports import free_port
from tests.unit.endpoint.fakes import FakeKernel, Node, request
from tests.unit.endpoint_restore.fakes import FakeLeft, link
from tests.unit.local_addresses.fakes import FakeLxcMap

pytestmark = pytest.mark.anyio

T = TypeVar("T")
REPLACED = {
    *(AgentConfig, Datapath, DatapathWatchdog, EndpointWatchdog, HostIPSync, HostLinks),
    *(Masquerade, Maps, MapWatchdog, PolicyMaps, Router),
}


OTHER_NODES = ("nodes", "tunnels")
"""Maps of which reconcilers read the rows."""


class Config(AgentConfig):
    """Where a test keeps its node; nothing is claimed."""

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
    """An object of the type that is only there to be asked for."""
    return kind.__new__(kind)


@asynccontextmanager
async def quiet() -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Devices that never change."""
    yield anyio.sleep_forever


async def nothing_ended() -> tuple[Collected, ...]:
    """Conntrack maps without connections."""
    return ()


def any_maps(*attributes: str, both_families: bool = False) -> None:
    """Maps that are not read."""


async def no_link(name: str) -> None:
    """A node without a tunnel."""
    del name


async def none_listed() -> list[Any]:
    """And without IPsec."""
    return []


async def none_removed() -> int:
    """Nor anything left of it."""
    return 0


async def no_routes(name: str) -> list[TunnelRoute]:
    """And without routes to other nodes."""
    del name
    return []


async def there() -> None:
    """Routes to the DNS proxy are there."""


class NoHostPolicy:
    """Programs of a node that may do everything."""

    host_policy = HostPolicy()

    def set_host_policy(self, policy: HostPolicy) -> None:
        """It stays so."""
        assert policy == HostPolicy()


def nothing() -> None:
    """Nor descriptors to give up."""


def fakes(directory: Path, kernel: FakeKernel, links: HostLinks) -> list[Cell]:
    """Everything of the agent that touches a kernel, replaced."""
    eth0 = Device(2, "eth0", "", bytes(6), 1500, True, (IPv4Interface("192.0.2.7/24"),))
    return [
        replace(AgentConfig, Config(directory)),
        replace(Kernel, fake(Kernel, devices=lambda: [eth0], subscribed=quiet)),
        replace(HostLinks, links),
        replace(ConntrackCollector, fake(ConntrackCollector, collect=nothing_ended)),
        replace(EndpointMaps, kernel),
        replace(EndpointPrograms, kernel),
        replace(PolicyMapPool, kernel),
        replace(HostPrograms, NoHostPolicy()),
        replace(StaleMaps, FakeLeft(kernel)),
        replace(PreviousAgent, FakeLeft(kernel)),
        replace(IpcacheTarget, kernel.prefixes.target),
        replace(LxcTarget, FakeLxcMap().target),
        replace(TunnelLinks, fake(TunnelLinks, find=no_link)),
        replace(TunnelRoutes, fake(TunnelRoutes, routes=no_routes)),
        replace(TunnelMaps, fake(TunnelMaps, facts=TunnelConfig)),
        replace(
            XfrmEdge, fake(XfrmEdge, states=none_listed, policies=none_listed, remove_routes=none_removed)
        ),
        replace(SocketHooks, fake(SocketHooks, take_off=list, close=nothing)),
        replace(Router, fake(Router, addressing=dict)),
        replace(WireguardDevice, fake(WireguardDevice, remove=nothing)),
        replace(
            ProxyRoutes,
            fake(ProxyRoutes, there=there, port=fake(ProxyPort, port=10000, families=[]), enabled=True),
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


def without_links() -> HostLinks:
    """A node without pods."""
    return fake(HostLinks, links=lambda without=(): [])


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """Settings of an agent that does not disturb others."""
    return {
        "ipv4-range": "10.0.1.0/24",
        "routing-mode": "native",
        "agent-health-port": free_port(),
        "write-cni-conf-when-ready": str(tmp_path / "net.d" / "05-cilium.conflist"),
    }


async def test_the_agent_starts_and_announces_itself(tmp_path: Path, settings: dict[str, object]) -> None:
    async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings):
        assert (tmp_path / "cilium.sock").is_socket()
        assert (tmp_path / "cni.sock").is_socket()
    assert not (tmp_path / "cilium.sock").exists()
    assert not (tmp_path / "cni.sock").exists()
    assert (tmp_path / "net.d" / "05-cilium.conflist").exists()


async def test_an_endpoint_of_before_is_there_when_anyone_can_ask(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    (tmp_path / "state").mkdir()
    node = Node(tmp_path / "state")
    endpoint = node.create(request(7))
    StateFiles(tmp_path / "state").write(endpoint)
    present = link(endpoint.ifindex, endpoint.ifname, alias=f"hive endpoint {endpoint.id}")
    links = fake(HostLinks, links=lambda without=(): [present])
    async with started(agent, *fakes(tmp_path, FakeKernel(), links), settings=settings) as hive:
        (restored,) = hive.get(Endpoints).all()
        assert (restored.id, restored.ipv4) == (endpoint.id, endpoint.ipv4)


@pytest.mark.parametrize("seed", range(5))
async def test_the_facts_of_the_start_hold_in_any_order_of_siblings(
    tmp_path: Path, settings: dict[str, object], seed: int
) -> None:
    recorder = Recorder(seed)
    async with recorder.started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings):
        facts = [(first, then) for first, then in ORDER if not {first, then} & REPLACED]
        recorder.assert_before(*facts)
        for first, then in facts:
            with pytest.raises(AssertionError, match="not in order"):
                recorder.assert_before((then, first))
    recorder.assert_clean()


async def test_an_api_that_was_down_with_what_it_needs_comes_back_whole(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    socket_path = tmp_path / "cilium.sock"
    async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings) as hive:
        modules = hive.get(Modules)
        assert "agent.api" in await modules.disable("agent.cni-server")
        assert not socket_path.exists()
        await modules.enable("agent.cni-server")
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket_path))) as session:
            with anyio.fail_after(30):
                async with session.get("http://localhost/v1/identity") as got:
                    assert got.status == 200
                async with session.get("http://localhost/statedb/changes/devices") as got:
                    assert b"eth0" in await got.content.readline()
                    assert not got.content.at_eof()


async def test_every_module_may_be_disabled_and_comes_back(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings) as hive:
        modules = hive.get(Modules)
        before = {table.name for table in hive.tables.all()}
        for name in modules.names:
            down = await modules.disable(name)
            assert {name, *await modules.enable(name)} == set(down)
            assert name != "agent.policy" or "agent.shell.admin" not in down, "it could not be stopped there"
        assert {table.name for table in hive.tables.all()} == before


@pytest.mark.timeout(3600 if EVERY else 600)  # the agent is started for every hook
async def test_whichever_hook_fails_the_agent_ends_cleanly(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    with structlog.testing.capture_logs():  # errors by the hundred
        failed = await fail_each_hook(
            agent,
            fakes=lambda: fakes(tmp_path, FakeKernel(), without_links()),
            settings=settings,
            seed=3,
            within=30,
            only=each_hook(),
        )
    assert {one.phase for one in failed} >= {"start", "stop"}, (
        "of the few hooks of a run some can be interrupted"
    )
    assert len({one.hook for one in failed}) > 8


async def test_the_start_waits_for_no_timer(tmp_path: Path, settings: dict[str, object]) -> None:
    with VirtualClock() as clock:
        began = clock.now
        async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=settings):
            assert clock.now == began
            await clock.advance(3600)
