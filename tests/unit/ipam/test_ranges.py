"""Ranges added and removed while pods use their addresses."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.base.addresses import IPAddress, IPNetwork, RangeFull
from cells.node.ipam import Ipam
from cells.node.ipam.ranges import AddressRanges, IpamError, PodRange
from lifecycle import Hive, Table
from lifecycle.testing import eventually
from tests.support.examples import scaled
from tests.unit.ipam.assigned import Given, hive

pytestmark = pytest.mark.anyio

NETWORKS = [
    ip_network(text) for text in ("10.0.0.0/29", "10.0.0.8/29", "10.0.0.0/28", "10.0.0.4/30", "10.1.0.0/30")
]


@settings(max_examples=scaled(80), deadline=None)
@given(
    st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=3, unique=True),
    st.lists(
        st.one_of(
            st.just("next"),
            st.integers(0, 20),
            st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=3, unique=True),
        ),
        max_size=40,
    ),
)
def test_an_address_has_one_owner_and_none_is_lost_whatever_ranges_do(
    first: list[IPNetwork], steps: list[object]
) -> None:
    ranges, active = AddressRanges(first), first
    taken: list[IPAddress] = []
    for step in steps:
        if step == "next":
            try:
                ip = ranges.allocate_next()
            except RangeFull:
                usable = {ip for network in active for ip in network.hosts()}
                assert usable <= set(taken)
                continue
            assert ip not in taken
            assert any(ip in network for network in active)
            taken.append(ip)
        elif isinstance(step, int):
            if taken:
                vanished = taken.pop(step % len(taken))
                assert ranges.release(vanished)
                assert not ranges.release(vanished)
        else:
            assert isinstance(step, list)
            ranges.follow(step)
            active = step
        assert len(ranges) == len(taken)
        assert all(ip in ranges and not ranges.allocate(ip) for ip in taken)
        ranges.forget_retired()


def states(hive: Hive) -> dict[str, str]:
    return {str(row.network): row.state for row in hive.get(Table[IPNetwork, PodRange]).all()}


async def test_a_node_that_is_full_goes_on_when_it_gets_another_range(tmp_path: Path) -> None:
    there = Given("10.1.0.0/30")
    async with hive(tmp_path, there).started() as started:
        ipam = started.get(Ipam)
        first = [ipam.allocate_next(f"default/pod-{number}")[0].ip for number in range(2)]
        with pytest.raises(IpamError, match="range is full"):
            ipam.allocate_next("default/pod-3")
        there.give("10.1.0.0/30", "10.2.0.0/30")
        await eventually(lambda: len(states(started)) == 2)
        assert ipam.allocate_next("default/pod-3")[0].ip in ip_network("10.2.0.0/30")
        assert all(ip in ip_network("10.1.0.0/30") for ip in first)
        assert ipam.status() == "IPv4: 3/4 allocated from 10.1.0.0/30, 10.2.0.0/30, "


async def test_a_range_that_is_taken_back_stays_until_its_last_pod_goes(tmp_path: Path) -> None:
    there = Given("10.1.0.0/28")
    async with hive(tmp_path, there).started() as started:
        ipam = started.get(Ipam)
        (old,) = ipam.allocate_next("default/old")
        there.give("10.2.0.0/28")
        await eventually(lambda: states(started) == {"10.2.0.0/28": "primary", "10.1.0.0/28": "retired"})
        (new,) = ipam.allocate_next("default/new")
        assert new.ip in ip_network("10.2.0.0/28")
        there.give()  # the object is deleted: that means nothing
        ipam.release(old.ip, old.pool)
        assert states(started) == {"10.2.0.0/28": "primary"}
        assert ipam.owner(new.ip) == "default/new"


async def test_pods_of_an_earlier_range_keep_their_addresses_over_a_restart(tmp_path: Path) -> None:
    async with hive(tmp_path, Given("10.1.0.0/28")).started():
        pass
    async with hive(tmp_path, Given("10.2.0.0/28")).started() as started:
        ipam = started.get(Ipam)
        ipam.allocate(ip_address("10.1.0.5"), "default/old [restored]", "default")
        ipam.forget_retired()
        assert states(started) == {"10.2.0.0/28": "primary", "10.1.0.0/28": "retired"}
        assert ipam.allocate_next("default/new")[0].ip in ip_network("10.2.0.0/28")
        ipam.release(ip_address("10.1.0.5"), "default")
        assert states(started) == {"10.2.0.0/28": "primary"}
