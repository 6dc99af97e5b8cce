"""Controllers of the agent in many orders of events: with failing writes, late messages, and crashes."""

import asyncio
import tempfile
from collections.abc import Collection, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv4Network, ip_interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import structlog

from cells.base.addresses import Family, IPAddress
from cells.cluster.host_ip_sync import HostEntries, wanted
from cells.config import AgentConfig
from cells.node.devices import Device
from cells.node.ipam import Ipam
from cells.node.ipam.allocator import EXPIRATION, Clock
from cells.node.ipam.pools import OperatorPools
from cells.node.ipam.settings import IpamSettings, pod_addressing
from cells.observe.controllers import Controllers, Rules
from lifecycle import Health, Hive, Jobs, Lifecycle, Logger, Reconciler, Table, invoke, module, provide
from lifecycle.testing import Simulation, explore
from tests.unit.host_ip_sync.fakes import FakeMaps
from tests.unit.ipcache.fakes import IpcacheOver
from tests.unit.local_addresses.fakes import FakeLxcMap, LocalAddressesOver

SEEDS = range(80)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with structlog.testing.capture_logs():  # failures by the hundred
        yield


def test_controllers_run_the_last_work_they_were_given_and_never_twice_at_a_time() -> None:
    def scenario(world: Simulation) -> None:
        running: set[str] = set()
        last: dict[str, int] = {}
        done: dict[str, int] = {}

        async def work(name: str, version: int) -> None:
            assert name not in running, f"{name} runs twice at a time"
            running.add(name)
            try:
                await world.delay(3)
                if world.chance(0.3):
                    raise OSError("lost")
                done[name] = version
            finally:
                running.discard(name)

        async def user(controllers: Controllers, name: str) -> None:
            for version in range(6):
                await world.delay(5)
                if world.random.random() < 0.2:
                    controllers.remove(name)
                    last.pop(name, None)
                    done.pop(name, None)
                    # what ended in the middle may have a turn of the loop yet to go
                    await asyncio.sleep(0.001)
                else:
                    last[name] = version
                    controllers.update(name, partial(work, name, version), Rules(interval=20))
                if world.chance(0.3):
                    controllers.trigger(name)

        async def main() -> None:
            cell = module("controllers", "over jobs", provide(Controllers), invoke(_controllers))
            async with Hive(cell).started() as hive:
                controllers = hive.get(Controllers)
                async with anyio.create_task_group() as group:
                    for name in ("sync", "dns", "gc"):
                        group.start_soon(user, controllers, name)
                await anyio.sleep(300)
                assert done == last
                assert {one.name for one in controllers.all()} == set(last)
            assert running == set()

        world.run(main)

    explore(scenario, SEEDS)


def _controllers(_: Controllers) -> None:
    """Ask for it."""


ROUTER = IPv4Address("10.0.1.5")


class FlakyLxcMap(FakeLxcMap):
    """Every now and then a write fails."""

    def __init__(self, world: Simulation) -> None:
        super().__init__()
        self.world = world

    def refuse(self, what: str, key: IPAddress) -> None:
        self.broken = self.world.chance(0.15)
        super().refuse(what, key)


class FlakyMaps(FakeMaps):
    """cilium_lxc is such a map."""

    def __init__(self, world: Simulation) -> None:
        super().__init__()
        self.local = FlakyLxcMap(world)

    def hosts(self) -> set[str]:
        """The addresses that are the node's own."""
        return {ip for ip, host in self.local.hosts.items() if host}


def _device(number: int) -> Device:
    return Device(
        ifindex=number,
        name=f"eth{number}",
        kind="",
        mac=bytes(6),
        mtu=1500,
        up=True,
        addresses=(ip_interface(f"192.0.2.{number}/24"),),
    )


def test_host_addresses_reach_the_maps_whatever_fails_and_wherever_the_agent_dies() -> None:
    def scenario(world: Simulation) -> None:
        maps = FlakyMaps(world)
        known_before: set[str] = set()

        def agent(final: Collection[int]) -> Any:
            def build(jobs: Jobs, log: Logger) -> None:
                devices: Table[int, Device] = Table("devices", key=lambda device: device.ifindex)
                source = devices.initializer("netlink")
                local = LocalAddressesOver(maps.local)
                claimed = local.table.initializer("host-ip-sync")
                entries = HostEntries(local, IpcacheOver(maps.prefixes), log)
                addresses = devices.derive(lambda found: wanted(found, [ROUTER]), name="hosts")
                hosts = Reconciler(addresses, entries, full_every=60)
                jobs.observe("sync", hosts)
                jobs.timer("sweep", local.sweep, 60)

                async def watch() -> None:
                    await world.delay(10)
                    assert known_before <= maps.hosts(), "pruned too early"
                    with devices.txn() as rows:
                        for number in range(1, 6):
                            if world.random.random() < 0.5:
                                rows.put(_device(number))
                    source.done()
                    for prefix in [prefix for prefix, _, _ in addresses.snapshot().items()]:
                        await hosts.wait_realised(prefix)
                    claimed.done()
                    for _ in range(6):
                        await world.delay(10)
                        number = world.random.randrange(1, 6)
                        with devices.txn() as rows:
                            rows.put(_device(number)) if world.chance(0.5) else rows.delete(number)
                    with devices.txn() as rows:
                        rows.replace_all(map(_device, final))

                jobs.one_shot("watch", watch)

            async def main() -> None:
                async with Hive(invoke(build)).started():
                    await anyio.sleep(600)

            return main

        world.run(agent({1, 2, 3}), crash=True)
        known_before |= maps.hosts()
        world.run(agent({2, 4}))
        expected = {"10.0.1.5", "192.0.2.2", "192.0.2.4"}
        assert maps.hosts() == expected
        assert {prefix for prefix, identity in maps.prefixes.identities.items() if identity == 1} >= {
            f"{ip}/32" for ip in expected
        }

    explore(scenario, SEEDS)


class LoopClock(Clock):
    """The time of the simulated world."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def test_no_address_is_handed_out_twice_and_none_is_lost(tmp_path: Path) -> None:
    """Plugins ask for addresses, and say in time that they use them, or too late, or die."""

    def scenario(world: Simulation) -> None:
        used: dict[str, str] = {}

        async def pod(ipam: Ipam, name: str) -> None:
            for turn in range(4):
                await world.delay(EXPIRATION)
                (got,) = ipam.allocate_next_expiring(f"{name}-{turn}", family=Family.IPV4)
                assert str(got.ip) not in used, f"{got.ip} was handed out twice"
                used[str(got.ip)] = got.owner
                late = world.random.random() * EXPIRATION * 1.5
                await anyio.sleep(min(late, EXPIRATION - 1))
                if world.chance(0.3) or late >= EXPIRATION:
                    del used[str(got.ip)]  # no pod relies on it: it expires by itself, or has expired
                    await anyio.sleep(EXPIRATION)
                    assert ipam.owner(got.ip) != got.owner, f"{got.ip} was lost"
                    continue
                assert got.expiration_uuid is not None
                ipam.stop_expiration(got.ip, got.pool, got.expiration_uuid)
                await world.delay(EXPIRATION)
                assert ipam.owner(got.ip) == got.owner, f"{got.ip} was taken away"
                if world.chance(0.5):
                    del used[str(got.ip)]
                    ipam.release(got.ip, got.pool)

        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            config = SimpleNamespace(ipv4=True, ipv6=False, state_dir=Path(folder))

            def ipam(lifecycle: Lifecycle, jobs: Jobs, health: Health, log: Logger) -> Ipam:
                settings = IpamSettings(ipv4_range="10.0.1.0/28")
                devices: Table[int, Device] = Table("devices", key=lambda device: device.ifindex)
                return Ipam(
                    pod_addressing(settings),
                    cast("AgentConfig", config),
                    devices,
                    LoopClock(),
                    Table("pod-ranges", key=lambda row: row.network),
                    OperatorPools(Table("pod-pool-requests", key=lambda row: row.pool)),
                    lifecycle=lifecycle,
                    jobs=jobs,
                    health=health,
                    log=log,
                )

            async def main() -> None:
                async with Hive(provide(ipam), invoke(Ipam)).started() as hive:
                    found = hive.get(Ipam)
                    async with anyio.create_task_group() as group:
                        for name in "abc":
                            group.start_soon(pod, found, name)
                    await anyio.sleep(2 * EXPIRATION)
                    assert found.dump() == used
                    assert found.ranges == {Family.IPV4: IPv4Network("10.0.1.0/28")}

            world.run(main)

    explore(scenario, SEEDS)


class Line:
    """A reconciler's target at the other end of a line that is slow, and loses every third message."""

    def __init__(self, world: Simulation, held: dict[str, int]) -> None:
        self.world, self.held = world, held

    async def observe(self) -> Mapping[str, int]:
        await self.send()
        return dict(self.held)

    def matches(self, row: int, observed: int) -> bool:
        return row == observed

    async def put(self, batch: Mapping[str, int]) -> None:
        for key, value in batch.items():
            await self.send()
            self.held[key] = value

    async def drop(self, batch: Collection[str]) -> None:
        for key in batch:
            await self.send()
            self.held.pop(key, None)

    async def send(self) -> None:
        await self.world.delay(0.5)
        if self.world.chance(0.3):
            raise OSError("lost")


def test_a_reconciler_converges_over_a_lossy_line_and_through_crashes() -> None:
    def scenario(world: Simulation) -> None:
        held: dict[str, int] = {}

        def build(jobs: Jobs) -> None:
            table: Table[str, int] = Table("numbers", key=str)
            source = table.initializer("source")
            jobs.observe("reconcile", Reconciler(table, Line(world, held), full_every=30))

            async def fill() -> None:
                await world.delay(3)
                assert "left behind" in held, "pruned before the source was done"
                source.done()
                for _ in range(5):
                    with table.txn() as rows:
                        rows.replace_all(range(world.random.randrange(5)))
                    await world.delay(3)
                with table.txn() as rows:
                    rows.replace_all([1, 3])

            jobs.one_shot("fill", fill)

        async def main() -> None:
            async with Hive(invoke(build)).started():
                await anyio.sleep(1200)

        for crash in (True, False):
            held["left behind"] = 1
            world.run(main, crash=crash)
        assert held == {"1": 1, "3": 3}

    explore(scenario, SEEDS)
