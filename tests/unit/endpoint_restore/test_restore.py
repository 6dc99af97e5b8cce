"""Restore of endpoints after a restart, and removal of stale state."""

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from cells.base.addresses import Family
from cells.endpoint import DatapathConfiguration, Endpoint, State
from cells.endpoint.restore import LxcRow, RestoredEndpoints
from cells.policy.maps import KnownRemoteClusters, KnownRules
from lifecycle import HealthTree, supply
from tests.support.waiting import eventually
from tests.unit.endpoint.fakes import Node, request
from tests.unit.endpoint_restore.fakes import Left, link

pytestmark = pytest.mark.anyio


@pytest.fixture
def left(tmp_path: Path) -> Left:
    directory = tmp_path / "state"
    directory.mkdir()
    return Left(directory)


@pytest.fixture
def endpoints(tmp_path: Path) -> list[Endpoint]:
    """Three endpoints as an agent before made them."""
    directory = tmp_path / "before"
    directory.mkdir()
    node = Node(directory)
    return [node.create(request(number)) for number in (1, 2, 3)]


async def restart(left: Left) -> RestoredEndpoints:
    async with left.hive().started() as hive:
        return hive.get(RestoredEndpoints)


def names(left: Left) -> list[str]:
    return left.node.saved


async def test_running_pods_come_back_as_they_were(left: Left, endpoints: list[Endpoint]) -> None:
    for endpoint in endpoints:
        left.running(endpoint)
    restored = await restart(left)
    assert restored.failed == {}
    found = left.endpoints.all()
    assert [(e.id, e.identity, e.ipv4, e.state) for e in found] == [
        (e.id, e.identity, e.ipv4, State.READY) for e in endpoints
    ]
    assert left.addresses.taken[IPv4Address("10.0.1.1")] == "default/web-1 [restored]"
    assert left.kernel.attached == [101, 102, 103]
    assert {slot.filled for slot in left.kernel.policies.values()} == {True}
    assert left.left.swept
    assert left.links.reaped == []
    assert not any(step.startswith("drop") for step in left.kernel.steps)
    assert names(left) == ["1", "2", "3"]


async def test_everything_is_visible_before_anything_is_regenerated(
    left: Left, endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for endpoint in endpoints:
        left.running(endpoint)
    attach = left.kernel.attach_endpoint

    def watched(ifindex: int, *, egress_prog: bool) -> None:
        seen.append(len(left.endpoints.all()))
        attach(ifindex, egress_prog=egress_prog)

    monkeypatch.setattr(left.kernel, "attach_endpoint", watched)
    await restart(left)
    assert seen == [3, 3, 3]


async def test_new_endpoints_get_unused_ids_and_identities(left: Left, endpoints: list[Endpoint]) -> None:
    left.running(replace(endpoints[0], identity=300))
    await restart(left)
    left.kernel.pool = [2]
    new = left.node.create(request(9, pod_namespace="other"))
    assert (new.id, new.identity) == (2, 301)


async def test_an_endpoint_that_was_saved_without_labels_comes_back_with_init(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(replace(endpoints[0], labels=()))
    await restart(left)
    (found,) = left.endpoints.all()
    assert found.identity == 5


async def test_an_endpoint_without_its_link_is_removed(left: Left, endpoints: list[Endpoint]) -> None:
    for endpoint in endpoints:
        left.running(endpoint)
    left.remove_link(endpoints[1])
    restored = await restart(left)
    assert restored.failed == {2: "interface lxc000000000002 could not be found"}
    assert names(left) == ["1", "3"]
    assert sorted(left.kernel.configs) == [101, 103]
    assert IPv4Address("10.0.1.2") not in left.kernel.lxc
    assert IPv4Address("10.0.1.2") not in left.kernel.ipcache
    assert IPv4Address("10.0.1.2") not in left.addresses.taken
    assert len(left.endpoints.all()) == 2


async def test_a_link_that_is_another_one_is_not_the_endpoints(left: Left, endpoints: list[Endpoint]) -> None:
    one, two, three = endpoints
    for endpoint in endpoints:
        left.running(endpoint)
    left.change_link(one, link(555, one.ifname, alias="hive endpoint 1"))
    left.change_link(two, link(two.ifindex, two.ifname, alias="hive endpoint 77"))
    left.change_link(three, link(three.ifindex, three.ifname, up=False))
    restored = await restart(left)
    assert restored.failed == {
        1: "interface lxc000000000001 has index 555, not 101: it was recreated",
        2: "interface lxc000000000002 belongs to endpoint 77, by its alias",
        3: "interface lxc000000000003 was never set up: the CNI ADD was interrupted",
    }
    assert sorted(left.links.reaped) == [102, 103, 555]
    assert left.kernel.is_clean
    assert names(left) == []


async def test_saved_state_without_ifindex_is_of_the_link_with_its_name(
    left: Left, endpoints: list[Endpoint]
) -> None:
    one = endpoints[0]
    left.running(one)
    left.node.files.write(replace(one, ifindex=0))
    restored = await restart(left)
    assert (restored.failed, left.links.reaped) == ({}, [])
    (endpoint,) = left.endpoints.all()
    assert endpoint.ifindex == one.ifindex


async def health(left: Left) -> tuple[str, str]:
    """The agent's status after the restart: level and message."""
    async with left.hive().started() as hive:
        (status,) = hive.get(HealthTree).snapshot("agent.restore")
    return status.level, status.message.rpartition(" ms")[2]


async def test_an_add_that_was_interrupted_leaves_a_healthy_agent(
    left: Left, endpoints: list[Endpoint]
) -> None:
    one, two, three = endpoints
    for endpoint in endpoints:
        left.running(endpoint)
    left.change_link(two, link(two.ifindex, two.ifname, up=False))
    left.remove_link(three)
    level, message = await health(left)
    assert (level, message.split("; removed as stale: ")[1].split(", ")) == (
        "ok",
        [
            "endpoint 2 (interface lxc000000000002 was never set up: the CNI ADD was interrupted)",
            "endpoint 3 (interface lxc000000000003 could not be found)",
        ],
    )
    assert names(left) == [str(one.id)]


async def test_a_pod_that_runs_and_cannot_be_restored_leaves_it_degraded(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    left.addresses.excluded.add(IPv4Address("10.0.1.1"))
    level, message = await health(left)
    assert (level, message.partition(" (")[0]) == ("degraded", "; failed: endpoint 1")


async def test_a_pod_of_ciliums_own_plugin_comes_back_too(left: Left, endpoints: list[Endpoint]) -> None:
    left.running(endpoints[0])
    left.change_link(endpoints[0], link(101, endpoints[0].ifname))
    assert (await restart(left)).failed == {}


async def test_a_pod_on_anothers_link_comes_back_as_it_was(left: Left, endpoints: list[Endpoint]) -> None:
    wanted = DatapathConfiguration(
        external_ipam=True, require_arp_passthrough=True, require_egress_prog=True, require_routing=False
    )
    chained = replace(endpoints[0], ifname="veth0", ipv4=IPv4Address("10.97.0.7"), pool="", datapath=wanted)
    left.running(chained)
    left.change_link(endpoints[0], link(101, "veth0", up=False))
    assert (await restart(left)).failed == {}
    (endpoint,) = left.endpoints.all()
    assert (endpoint.ifname, endpoint.ifindex, endpoint.datapath) == ("veth0", 101, wanted)
    assert "attach both ways" in left.kernel.steps
    assert IPv4Address("10.97.0.7") not in left.addresses.taken


async def test_an_address_of_the_node_itself_fails_its_endpoint_alone(
    left: Left, endpoints: list[Endpoint]
) -> None:
    for endpoint in endpoints:
        left.running(endpoint)
    left.addresses.excluded.add(IPv4Address("10.0.1.2"))
    restored = await restart(left)
    assert restored.failed == {
        2: "Failed to re-allocate IP of endpoint: IP 10.0.1.2 is excluded, owned by node-ip"
    }
    assert [endpoint.id for endpoint in left.endpoints.all()] == [1, 3]


async def test_an_address_that_two_claim_stays_with_one(left: Left, endpoints: list[Endpoint]) -> None:
    one, two, _ = endpoints
    left.running(one)
    left.running(replace(two, ipv4=one.ipv4))
    left.left.rows[IPv4Address("10.0.1.1")] = LxcRow(IPv4Address("10.0.1.1"), 1, 101, 256, is_host=False)
    restored = await restart(left)
    assert list(restored.failed) == [2]
    assert left.kernel.lxc == {IPv4Address("10.0.1.1"): 1}
    assert left.kernel.configs == {101: 1}


async def test_a_running_pod_outlives_a_kernel_that_refuses_its_policy_map(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    left.kernel.refuse = "adopt"
    restored = await restart(left)
    assert (restored.failed, list(restored.quarantined)) == ({}, [1])
    assert left.links.reaped == []
    assert left.addresses.taken == {IPv4Address("10.0.1.1"): "endpoint 1 [quarantined]"}
    assert left.kernel.configs == {101: 1}
    assert names(left) == ["1"]  # the next start tries again


async def test_an_endpoint_that_cannot_be_read_is_left_alone_while_its_link_exists(
    left: Left, endpoints: list[Endpoint]
) -> None:
    for endpoint in endpoints[:2]:
        left.running(endpoint)
    (left.node.files.directory / "1" / "ep_config.json").write_text('{"ID": 1, "IPv')
    restored = await restart(left)
    assert restored.failed == {}
    assert {number: one.ifindex for number, one in restored.quarantined.items()} == {1: 101}
    assert left.addresses.taken[IPv4Address("10.0.1.1")] == "endpoint 1 [quarantined]"
    assert left.kernel.configs == {101: 1, 102: 2}
    assert left.kernel.lxc[IPv4Address("10.0.1.1")] == 1
    assert left.kernel.ipcache[IPv4Address("10.0.1.1")] == 256
    assert 1 in left.kernel.policies
    assert not left.kernel.policies[1].filled
    assert left.links.reaped == []
    assert names(left) == ["1", "2"]
    assert [endpoint.id for endpoint in left.endpoints.all()] == [2]


async def test_what_an_unreadable_endpoint_has_is_freed_when_its_link_goes(
    left: Left, endpoints: list[Endpoint]
) -> None:
    ipv6 = IPv6Address("fd00::1")
    left.running(replace(endpoints[0], ipv6=ipv6, ipv6_pool="default"))
    left.running(endpoints[1])
    (left.node.files.directory / "1" / "ep_config.json").write_text('{"ID": 1, "IPv')
    async with left.hive().started():
        assert left.addresses.taken[ipv6] == left.addresses.taken[IPv4Address("10.0.1.1")]
        left.remove_link(endpoints[0])
        left.links.went.set()
        await to_thread.run_sync(eventually, lambda: names(left) == ["2"])
        await to_thread.run_sync(eventually, lambda: 1 in left.kernel.pool)
    assert list(left.addresses.taken) == [IPv4Address("10.0.1.2")]
    assert list(left.left.rows) == list(left.kernel.ipcache) == [IPv4Address("10.0.1.2")]
    assert left.kernel.configs == {102: 2}
    assert set(left.kernel.forgotten) == {ipv6, IPv4Address("10.0.1.1")}


async def test_both_addresses_come_back_ipv6_first_or_none(left: Left, endpoints: list[Endpoint]) -> None:
    one, two = IPv6Address("fd00::1"), IPv6Address("fd00::2")
    left.running(replace(endpoints[0], ipv6=one, ipv6_pool="default"))
    left.running(replace(endpoints[1], ipv6=two, ipv6_pool="default"))
    left.addresses.excluded.add(IPv4Address("10.0.1.2"))
    restored = await restart(left)
    assert list(restored.failed) == [2]
    assert list(left.addresses.taken) == [one, IPv4Address("10.0.1.1")]
    assert left.addresses.released == [(two, "default")]
    assert set(left.kernel.lxc) == set(left.kernel.ipcache) == {one, IPv4Address("10.0.1.1")}
    found = left.endpoints.lookup("ipv6:fd00:0::1")
    assert found is not None
    assert found.addresses == (one, IPv4Address("10.0.1.1"))


async def test_an_address_of_a_family_that_is_off_now_stays_without_being_claimed(
    left: Left, endpoints: list[Endpoint]
) -> None:
    both = replace(endpoints[0], ipv6=IPv6Address("fd00::1"), ipv6_pool="default")
    left.running(both)
    left.addresses.ranges = {Family.IPV4: left.addresses.ranges[Family.IPV4]}
    assert (await restart(left)).failed == {}
    assert list(left.addresses.taken) == [IPv4Address("10.0.1.1")]
    assert set(left.kernel.lxc) == set(both.addresses)
    assert left.node.files.scan().endpoints[1].endpoint.addresses == both.addresses


async def test_an_address_outside_of_the_range_stays_without_being_claimed(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    moved = replace(endpoints[1], ipv4=IPv4Address("10.7.0.9"))
    left.running(moved)
    chained = DatapathConfiguration(external_ipam=True, require_arp_passthrough=True)
    left.running(replace(endpoints[2], ipv4=IPv4Address("10.8.0.9"), datapath=chained))
    restored = await restart(left)
    assert (restored.failed, restored.addresses_outside_pod_cidrs()) == ({}, [IPv4Address("10.7.0.9")])
    assert list(left.addresses.taken) == [IPv4Address("10.0.1.1")]
    assert left.endpoints.lookup("ipv4:10.7.0.9") is not None
    assert left.links.reaped == []


async def test_an_endpoint_that_cannot_be_read_goes_with_its_link(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    (left.node.files.directory / "1" / "ep_config.json").write_text("")
    left.remove_link(endpoints[0])
    await restart(left)
    assert left.kernel.is_clean
    assert left.addresses.taken == {}
    assert names(left) == []


async def test_an_endpoint_of_which_nothing_is_known_keeps_its_link_and_directory(left: Left) -> None:
    (left.node.files.directory / "7").mkdir()
    (left.node.files.directory / "7" / "ep_config.json").write_text("")
    left.links.present.append(link(7, "lxc0123456789ab", alias="hive endpoint 7"))
    await restart(left)
    assert left.links.reaped == []
    assert names(left) == ["7"]


async def test_half_written_state_is_removed_and_half_switched_state_restored(
    left: Left, endpoints: list[Endpoint]
) -> None:
    for endpoint in endpoints[:2]:
        left.running(endpoint)
    directory = left.node.files.directory
    (directory / "1").rename(directory / "1_next")
    (directory / "2_next").mkdir()
    (directory / "3_next").mkdir()
    restored = await restart(left)
    assert [endpoint.id for endpoint in restored.endpoints] == [1, 2]
    assert names(left) == ["1", "2"]


async def test_rows_without_endpoint_go_and_rows_of_the_node_stay(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    stale, host = IPv4Address("10.0.1.50"), IPv4Address("10.0.1.60")
    left.left.rows[stale] = LxcRow(stale, 50, 150, 256, is_host=False)
    left.kernel.lxc[stale] = 50
    left.kernel.prefixes.put({str(stale): 256})
    left.kernel.configs[150] = 50
    left.left.hosts.append(LxcRow(host, 0, 0, 0, is_host=True))
    await restart(left)
    assert list(left.left.rows) == [IPv4Address("10.0.1.1")]
    assert left.kernel.configs == {101: 1}
    assert list(left.kernel.ipcache) == [IPv4Address("10.0.1.1")]
    assert len(left.left.hosts) == 1


async def test_only_links_without_an_owner_are_removed(left: Left) -> None:
    left.links.present = [
        link(1, "lxc000000000001", alias="hive endpoint 1"),  # ours, no state
        link(2, "lxc000000000002", up=False),  # never finished
        link(3, "lxc000000000003"),  # Cilium's own plugin's
        link(4, "lxc000000000004", alias="uplink to the moon"),  # of another program
        link(5, "eth7", up=False),
        link(6, "lxc_health"),
        link(7, "lxc000000000007", peer=8, here=True),  # half-plumbed pair
        link(8, "tmp00000", peer=7, here=True, up=False),
        link(9, "cilium_host", peer=10, here=True),
        link(10, "cilium_net", peer=9, here=True),
    ]
    await restart(left)
    assert left.links.reaped == [1, 2, 7, 8]


async def test_the_nodes_own_and_fake_endpoints_are_not_restored(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.node.files.write(replace(endpoints[0], labels=("reserved:health",)))
    left.node.files.write(replace(endpoints[1], labels=("reserved:host",)))
    restored = await restart(left)
    assert (restored.endpoints, restored.failed) == ([], {})
    assert names(left) == []


async def test_an_external_address_is_not_claimed(left: Left, endpoints: list[Endpoint]) -> None:
    left.running(replace(endpoints[0], datapath=DatapathConfiguration(external_ipam=True)))
    left.addresses.excluded.add(IPv4Address("10.0.1.1"))
    assert (await restart(left)).failed == {}
    assert left.addresses.taken == {}


async def test_two_label_sets_with_one_saved_identity_get_different_identities(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    left.running(replace(endpoints[1], labels=("k8s:app=db",)))
    await restart(left)
    identities = {endpoint.id: endpoint.identity for endpoint in left.endpoints.all()}
    assert identities == {1: 256, 2: 257}
    assert left.kernel.ipcache[IPv4Address("10.0.1.2")] == 257
    assert left.node.files.scan().endpoints[2].endpoint.identity == 257


async def test_a_failed_cleanup_does_not_stop_the_others(left: Left, endpoints: list[Endpoint]) -> None:
    left.running(endpoints[0])
    left.running(endpoints[1])
    left.remove_link(endpoints[1])
    left.left.refuse = "drop_address"
    async with left.hive().started() as hive:
        statuses = {status.module: status for status in hive.get(HealthTree).snapshot()}
    assert left.kernel.configs == {101: 1}
    assert names(left) == ["1"]
    message = next(status.message for status in statuses.values() if "; not removed: " in status.message)
    assert "cilium_lxc" in message


async def test_a_regeneration_that_fails_concerns_its_endpoint_alone(
    left: Left, endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    for endpoint in endpoints:
        left.running(endpoint)

    def attach(ifindex: int, **_: bool) -> None:
        if ifindex == 102:
            raise OSError(19, "No such device")

    monkeypatch.setattr(left.kernel, "attach_endpoint", attach)
    await restart(left)
    shown = {endpoint.id: left.endpoints.shown_state(endpoint) for endpoint in left.endpoints.all()}
    assert shown == {1: State.READY, 2: State.NOT_READY, 3: State.READY}
    assert left.node.recovery.recoveries == [2]


async def test_lost_policy_maps_that_cannot_be_prepared_do_not_stop_the_start(
    left: Left, endpoints: list[Endpoint]
) -> None:
    left.running(endpoints[0])
    left.left.refuse = "prepare"
    assert (await restart(left)).failed == {}


async def test_an_empty_node_restores_to_nothing(left: Left) -> None:
    restored = await restart(left)
    assert (restored.endpoints, restored.failed, restored.quarantined) == ([], {}, {})


@pytest.mark.parametrize("known", [KnownRules, KnownRemoteClusters], ids=["rules", "remote clusters"])
async def test_pods_keep_their_policies_until_rules_and_remote_clusters_are_known(
    known: Any, left: Left, endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.endpoint.restore.regeneration.RULES_SECONDS", 0.02)
    left.running(endpoints[0])
    rules = LateRules()
    async with left.hive(supply(rules, known)).started() as hive:
        (waiting,) = left.endpoints.all()
        assert waiting.state is State.RESTORING
        assert not any(slot.filled for slot in left.kernel.policies.values())
        status = {one.module: one for one in hive.get(HealthTree).snapshot()}["agent.regenerate"]
        assert (status.level, "networkpolicies" in status.message) == ("degraded", True)
        rules.arrived.set()
        await to_thread.run_sync(eventually, lambda: left.endpoints.all()[0].state is State.READY)
        assert {slot.filled for slot in left.kernel.policies.values()} == {True}


class LateRules:
    """KnownRules of a source that is slow."""

    missing = "networkpolicies"

    def __init__(self) -> None:
        self.arrived = anyio.Event()

    async def known(self) -> None:
        await self.arrived.wait()
