"""The owner of each address of the node: one table, one writer of cilium_lxc."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest

from cells.maps.records.endpoints import LxcValue
from cells.node.local_addresses import LocalAddress
from tests.unit.local_addresses.fakes import HOST, FakeLxcMap, LocalAddressesOver

pytestmark = pytest.mark.anyio

POD, OTHER = IPv4Address("10.0.1.7"), IPv4Address("10.0.1.8")
SEVEN, EIGHT = (LxcValue(ifindex=number, endpoint_id=number, identity=300) for number in (7, 8))


async def test_a_new_address_is_written_at_once_and_voids_verdicts_once() -> None:
    kernel = FakeLxcMap()
    local = LocalAddressesOver(kernel)
    local.put_endpoint([POD], SEVEN)
    assert kernel.rows == {POD: SEVEN}
    assert local.table.get(POD) == LocalAddress(POD, False, 7, SEVEN)
    assert kernel.invalidated == 1


async def test_correct_rows_are_not_written_again() -> None:
    kernel = FakeLxcMap()
    local = LocalAddressesOver(kernel)
    local.put_endpoint([POD], SEVEN)
    local.put_host(OTHER)
    local.put_endpoint([POD], SEVEN)
    local.put_host(OTHER)
    await local.sweep()
    assert kernel.writes == [("update", "10.0.1.7"), ("update", "10.0.1.8")]


async def test_the_nodes_claim_counts_and_the_endpoints_comes_back_after_it() -> None:
    kernel = FakeLxcMap()
    local = LocalAddressesOver(kernel)
    local.put_endpoint([POD], SEVEN)
    local.put_host(POD)
    assert kernel.rows == {POD: HOST}
    local.put_endpoint([POD], EIGHT)
    assert kernel.rows == {POD: HOST}
    local.drop_host(POD)
    assert kernel.rows == {POD: EIGHT}
    assert kernel.invalidated == 3


async def test_an_endpoint_takes_away_only_what_is_its_own() -> None:
    kernel = FakeLxcMap()
    local = LocalAddressesOver(kernel)
    local.put_endpoint([POD], EIGHT)
    local.drop_endpoint(POD, 7)
    assert kernel.rows == {POD: EIGHT}
    local.put_host(POD)
    local.drop_endpoint(POD, 8)
    assert kernel.rows == {POD: HOST}
    local.drop_host(POD)
    assert kernel.rows == {}
    assert len(local.table) == 0


async def test_rows_of_a_previous_agent_stay_until_all_sources_are_initialized() -> None:
    kernel = FakeLxcMap()
    kernel.put({"10.0.1.7": False, "10.0.1.8": False, "192.0.2.1": True, "192.0.2.2": True})
    local = LocalAddressesOver(kernel)
    source = local.table.initializer("endpoint-restore")
    local.put_host(IPv4Address("192.0.2.1"))
    local.adopt([POD, IPv4Address("192.0.2.2"), IPv4Address("10.0.1.9")])
    assert kernel.writes == []
    assert set(local.leftovers) == {OTHER, IPv4Address("192.0.2.2")}
    source.done()
    await local.sweep()
    assert kernel.hosts == {"10.0.1.7": False, "192.0.2.1": True}
    local.drop_endpoint(POD, 7)
    assert POD not in kernel.rows


async def test_an_endpoint_that_never_came_back_takes_its_row_away() -> None:
    kernel = FakeLxcMap()
    kernel.put({"10.0.1.7": False})
    local = LocalAddressesOver(kernel)
    local.drop_endpoint(POD, 8)
    assert POD in kernel.rows
    local.drop_endpoint(POD, 7)
    assert kernel.rows == {}
    assert local.leftovers == {}


async def test_rows_changed_by_others_are_restored_and_counted() -> None:
    kernel = FakeLxcMap()
    local = LocalAddressesOver(kernel)
    local.put_endpoint([POD], SEVEN)
    local.put_host(OTHER)
    await local.sweep()
    kernel.rows.clear()
    kernel.rows.update({POD: HOST, IPv4Address("10.0.1.9"): SEVEN})
    await local.sweep()
    assert kernel.rows == {POD: SEVEN, OTHER: HOST}
    assert local.drift == 3


async def test_a_refused_row_leaves_the_claim_as_it_was_and_a_refused_removal_is_made_up_for() -> None:
    kernel = FakeLxcMap()
    local = LocalAddressesOver(kernel)
    local.put_endpoint([POD], SEVEN)
    kernel.broken = True
    with pytest.raises(OSError, match="Cannot allocate memory"):
        local.put_endpoint([POD], EIGHT)
    assert local.table.get(POD) == LocalAddress(POD, False, 7, SEVEN)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        local.drop_endpoint(POD, 7)
    kernel.broken = False
    await local.sweep()
    assert kernel.rows == {}
