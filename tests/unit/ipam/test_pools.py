"""IPAM mode multi-pool: a node's requests of pools, its ranges, and their release."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.base.addresses import Family, IPNetwork
from cells.node.devices import Device
from cells.node.ipam import Ipam, cell
from cells.node.ipam.allocator import Clock
from cells.node.ipam.pools import (
    AddressDemand,
    AssignedPools,
    PodPools,
    PoolRequest,
    PoolState,
    round_up_demand,
)
from cells.node.ipam.ranges import IpamError, IpamLaterError, PodRange
from lifecycle import Hive, Table, invoke, replace, supply
from lifecycle.testing import eventually
from tests.unit.ipam.assigned import Given
from tests.unit.ipam.assigned import hive as host_scope
from tests.unit.ipam.clock import FakeClock
from tests.unit.ipam.devices import Node, devices

pytestmark = pytest.mark.anyio
V4, V6 = Family.IPV4, Family.IPV6
MODE = {"ipam": "multi-pool"}


class Reported:
    """A CiliumNode, as far as it is about pools."""

    def __init__(self, allocated: Mapping[str, str] | None = None, requested: int = 0) -> None:
        self.state: PoolState | None = None
        self.news = anyio.Event()
        if allocated is not None:
            self.state = self.spoken(allocated, requested=requested)

    def spoken(self, allocated: Mapping[str, str], problem: str = "", requested: int = 0) -> PoolState:
        pools: dict[str, tuple[IPNetwork, ...]] = {
            pool: tuple(map(ip_network, texts.split())) for pool, texts in allocated.items()
        }
        return PoolState({"default": {V4: requested}} if requested else {}, pools, problem)

    def pools(self) -> PoolState | None:
        return self.state

    async def changes(self) -> AsyncIterator[object]:
        while True:
            await self.news.wait()
            yield None

    def override(self, problem: str = "", **allocated: str) -> None:
        self.state = self.spoken(allocated, problem)
        self.news.set()
        self.news = anyio.Event()


class Chosen:
    """What pods ask for."""

    def __init__(self, **pools: str) -> None:
        self.of = pools

    def pool_of(self, owner: str, family: Family) -> str:
        del family
        return self.of.get(owner.rpartition("/")[2], "")


def hive(
    folder: Path,
    reported: Reported,
    chosen: Chosen | None = None,
    *,
    ipv6: bool = False,
    clock: Clock | None = None,
    **settings: str,
) -> Hive:
    def needed(_: Ipam) -> None: ...

    return Hive(
        cell,
        supply(devices(), type=Table[int, Device]),
        supply(Node(folder, ipv6=ipv6), type=Node.__bases__[0]),
        supply(reported, type=AssignedPools),
        supply(chosen or Chosen(), type=PodPools),
        replace(Clock, clock or FakeClock()),
        invoke(needed),
        settings=MODE | {name.replace("_", "-"): value for name, value in settings.items()},
    )


def states(hive: Hive) -> dict[str, str]:
    return {f"{row.pool} {row.network}": row.state for row in hive.get(Table[IPNetwork, PodRange]).all()}


def asked(hive: Hive) -> dict[str, int]:
    return {row.pool: row.ipv4 for row in hive.get(Table[str, PoolRequest]).all() if row.ipv4}


def released(hive: Hive) -> list[str]:
    return [str(one) for row in hive.get(Table[str, PoolRequest]).all() for one in row.released]


@pytest.mark.parametrize(
    ("needed", "ahead", "asked"),
    [(0, 8, 8), (1, 8, 16), (8, 8, 16), (9, 8, 24), (5, 0, 5), (0, 0, 0), (3, 1, 4)],
)
def test_needs_are_rounded_up_with_some_ahead(needed: int, ahead: int, asked: int) -> None:
    assert round_up_demand(needed, ahead) == asked


def test_demand_of_cancelled_requests_is_not_requested() -> None:
    clock = FakeClock()
    demand = AddressDemand({}, clock)
    demand.add_pending("p", V4, "default/a")
    demand.add_pending("p", V4, "default/b")
    assert demand.needed({}, [V4]) == {("p", V4): 2}
    demand.remove_pending("p", V4, "default/a")
    assert demand.needed({("p", V4): 1}, [V4]) == {("p", V4): 2}
    clock.time += 301
    assert demand.needed({("p", V4): 1}, [V4]) == {("p", V4): 1}


async def test_the_start_asks_for_pools_and_waits_until_each_has_an_address(tmp_path: Path) -> None:
    reported = Reported({})
    one = hive(tmp_path, reported, ipam_multi_pool_pre_allocation="default=4,red=2")
    started, over = anyio.Event(), anyio.Event()

    async def run() -> None:
        async with one.started():
            started.set()
            await over.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await eventually(lambda: asked(one) == {"default": 4, "red": 2})
        reported.override("cannot allocate from non-existing pool: red", default="10.0.0.0/28")
        await eventually(
            lambda: any("non-existing pool: red" in (row.message or "") for row in one.health.snapshot())
        )
        assert not started.is_set()
        reported.override(default="10.0.0.0/28", red="10.9.0.0/28")
        with anyio.fail_after(30):
            await started.wait()
        assert one.get(Ipam).status() == "IPv4: 2 IPAM pool(s) available, "
        over.set()


async def test_a_pod_gets_its_address_of_the_pool_it_chooses(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/28", "red": "10.9.0.0/28"})
    async with hive(tmp_path, reported, Chosen(web="red")).started() as one:
        ipam = one.get(Ipam)
        (web,), (other,) = ipam.allocate_next("default/web"), ipam.allocate_next("default/other")
        assert (web.pool, other.pool) == ("red", "default")
        assert web.ip in ip_network("10.9.0.0/28")
        assert ipam.dump() == {str(other.ip): "default/other", f"red/{web.ip}": "default/web"}
        assert ipam.usage() == {V4: (2, 28)}
        assert asked(one) == {"default": 16, "red": 1}
        ipam.release(web.ip, "red")
        assert ipam.dump() == {str(other.ip): "default/other"}
        assert ipam.allocate_next("x", "red")[0].pool == "red"  # by name, as the API asks


async def test_a_pool_that_is_not_there_is_asked_for_and_the_pod_can_wait_for_it(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/28"})
    async with hive(tmp_path, reported, Chosen(web="red")).started() as one:
        ipam = one.get(Ipam)
        with pytest.raises(
            IpamLaterError, match=r'from pool "red" \(family ipv4\): pool not \(yet\) available'
        ) as later:
            ipam.allocate_next("default/web")
        assert asked(one) == {"default": 8, "red": 1}
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                await later.value.wait()

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            reported.override(default="10.0.0.0/28", red="10.9.0.0/28")
        assert ipam.allocate_next("default/web")[0].pool == "red"
        assert asked(one) == {"default": 8, "red": 1}


async def test_a_refusal_of_the_operator_fails_the_request_at_once(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/28"})
    async with hive(tmp_path, reported, Chosen(web="red")).started() as one:
        refusal = 'failed to allocate ipv4 address for node "n" from pool "red": pool empty'
        reported.state = reported.spoken({"default": "10.0.0.0/28"}, refusal)
        with pytest.raises(IpamError, match="pool empty") as refused:
            one.get(Ipam).allocate_next("default/web")
        assert not isinstance(refused.value, IpamLaterError)


async def test_of_two_families_both_come_of_their_pools_or_none(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/28 fd00::/124", "red": "fd00:9::/124"})
    async with hive(tmp_path, reported, Chosen(web="red"), ipv6=True).started() as one:
        ipam = one.get(Ipam)
        with pytest.raises(IpamLaterError, match="family ipv4"):
            ipam.allocate_next("default/web")
        assert ipam.dump() == {}
        six, four = ipam.allocate_next("default/other")
        assert (six.ip.version, four.ip.version) == (6, 4)


async def test_a_full_pool_goes_on_with_the_next_range_and_gives_back_what_it_needs_no_more(
    tmp_path: Path,
) -> None:
    reported = Reported({"default": "10.0.0.0/29"})
    async with hive(tmp_path, reported, ipam_multi_pool_pre_allocation="default=2").started() as one:
        ipam = one.get(Ipam)
        ipam.forget_retired()  # restored endpoints have what is theirs
        pods = [ipam.allocate_next(f"default/{number}")[0] for number in range(6)]
        assert asked(one) == {"default": 8}
        with pytest.raises(IpamLaterError, match="all pod CIDR ranges are exhausted"):
            ipam.allocate_next("default/7")
        assert asked(one) == {"default": 10}
        reported.override(default="10.0.0.0/29 10.0.0.8/29")
        await eventually(lambda: len(states(one)) == 2)
        seventh = ipam.allocate_next("default/7")[0]
        assert seventh.ip in ip_network("10.0.0.8/29")
        ipam.release(seventh.ip, "default")
        for pod in pods:
            ipam.release(pod.ip, "default")
        assert asked(one) == {"default": 2}
        assert released(one) == ["10.0.0.8/29"]
        assert states(one) == {"default 10.0.0.0/29": "primary"}
        again = [ipam.allocate_next(f"default/{number}")[0] for number in range(6)]
        assert all(pod.ip in ip_network("10.0.0.0/29") for pod in again)
        with pytest.raises(IpamLaterError):  # not what is being given back: another node may have it already
            ipam.allocate_next("default/7")
        reported.override(default="10.0.0.0/29")
        await eventually(lambda: released(one) == [])
        reported.override(default="10.0.0.0/29 10.0.0.8/29")
        await eventually(lambda: len(states(one)) == 2)
        assert ipam.allocate_next("default/7")[0].ip in ip_network("10.0.0.8/29")


async def test_nothing_is_given_back_or_asked_less_of_before_endpoints_are_restored(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/28 10.0.0.16/28"}, requested=24)
    async with hive(tmp_path, reported).started() as one:
        assert (asked(one), released(one)) == ({"default": 24}, [])
        one.get(Ipam).forget_retired()
        assert (asked(one), released(one)) == ({"default": 8}, ["10.0.0.16/28"])


async def test_a_range_that_goes_stays_until_its_last_pod_goes(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/28", "red": "10.9.0.0/28"})
    async with hive(tmp_path, reported, Chosen(web="red")).started() as one:
        ipam = one.get(Ipam)
        (web,) = ipam.allocate_next("default/web")
        ipam.forget_retired()
        reported.override(default="10.0.0.0/28")
        await eventually(lambda: states(one)["red 10.9.0.0/28"] == "retired")
        assert ipam.covers(web.ip)
        with pytest.raises(IpamLaterError, match="not \\(yet\\) available"):
            ipam.allocate_next("default/web")
        ipam.release(web.ip, "red")
        assert states(one) == {"default 10.0.0.0/28": "primary"}


async def test_restored_pods_have_their_addresses_with_an_empty_or_other_pool_object(
    tmp_path: Path,
) -> None:
    async with hive(tmp_path, Reported({"default": "10.0.0.0/28", "red": "10.9.0.0/28"})).started():
        pass
    async with hive(tmp_path, Reported()).started() as one:  # without a report
        ipam = one.get(Ipam)
        assert ipam.allocate(ip_address("10.9.0.3"), "default/web [restored]", "red").pool == "red"
        assert ipam.allocate_next("default/new")[0].ip in ip_network("10.0.0.0/28")
    reported = Reported({"default": "10.5.0.0/28"})
    async with hive(tmp_path, reported).started() as one:
        ipam = one.get(Ipam)
        assert ipam.allocate(ip_address("10.9.0.3"), "default/web [restored]", "default").pool == "red"
        ipam.forget_retired()
        assert states(one) == {"default 10.5.0.0/28": "primary", "red 10.9.0.0/28": "retired"}


async def test_addresses_of_pods_of_another_ipam_mode_stay_and_are_not_allocated(tmp_path: Path) -> None:
    given = Given("10.0.0.0/29")
    async with host_scope(tmp_path, given).started() as one:
        (old,) = one.get(Ipam).allocate_next("default/old")
    reported = Reported({"default": "10.0.0.0/28"})
    async with hive(tmp_path, reported).started() as one:
        ipam = one.get(Ipam)
        ipam.allocate(old.ip, "default/old [restored]", old.pool)
        ipam.forget_retired()
        others = {ipam.allocate_next(f"default/{number}")[0].ip for number in range(13)}
        assert old.ip not in others
        with pytest.raises(IpamLaterError):
            ipam.allocate_next("default/14")
    async with host_scope(tmp_path, Given("10.7.0.0/29")).started() as one:
        ipam = one.get(Ipam)
        for ip in (old.ip, *others):
            ipam.allocate(ip, "default/old [restored]", "default")
        assert ipam.allocate_next("default/new")[0].ip in ip_network("10.7.0.0/29")


async def test_pools_that_overlap_hand_out_an_address_once(tmp_path: Path) -> None:
    reported = Reported({"default": "10.0.0.0/30", "red": "10.0.0.0/29"})
    async with hive(
        tmp_path, reported, Chosen(**{f"r{number}": "red" for number in range(9)})
    ).started() as one:
        ipam = one.get(Ipam)
        found: list[Any] = [ipam.allocate_next("default/x")[0].ip for _ in range(2)]
        found += [ipam.allocate_next(f"default/r{number}")[0].ip for number in range(4)]
        assert len(set(found)) == 6
        with pytest.raises(IpamLaterError):
            ipam.allocate_next("default/r5")
