"""The node's maps over starts and restarts."""

import json
from pathlib import Path

import anyio
import pytest

from cells import config, maps
from cells.maps.bpf import pin
from cells.maps.map import MapSpec, MapType, create_map
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.specs import policy_spec
from lifecycle import Hive, NotStartedError, StartError, explain, invoke
from tests.kernel.maps.nodes import GLOBALS, SMALL, agent, pins, use
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

ALL = {
    "cilium_ct4_global",
    "cilium_ct6_global",
    "cilium_ct_any4_global",
    "cilium_ct_any6_global",
    "cilium_egress_gw_policy_v4",
    "cilium_events",
    "cilium_ipcache",
    "cilium_ipmasq_v4",
    "cilium_ipmasq_v6",
    "cilium_ipv4_frag_datagrams",
    "cilium_ipv6_frag_datagrams",
    "cilium_l2_responder_v4",
    "cilium_lb4_affinity",
    "cilium_lb4_backends_v3",
    "cilium_lb4_maglev",
    "cilium_lb4_reverse_nat",
    "cilium_lb4_reverse_sk",
    "cilium_encrypt_state",
    "cilium_lb4_services_v2",
    "cilium_lb4_source_range",
    "cilium_lb6_affinity",
    "cilium_lb6_backends_v3",
    "cilium_lb6_maglev",
    "cilium_lb6_reverse_nat",
    "cilium_lb6_reverse_sk",
    "cilium_lb6_services_v2",
    "cilium_lb6_source_range",
    "cilium_lb_affinity_match",
    "cilium_lxc",
    "cilium_metrics",
    "cilium_node_map_v2",
    "cilium_nodeport_neigh4",
    "cilium_nodeport_neigh6",
    "cilium_runtime_config",
    "cilium_snat_v4_external",
    "cilium_snat_v6_external",
    "cilium_skip_lb4",
    "cilium_skip_lb6",
    "cilium_tunnel_map",
    "hive_devices",
    "hive_encryption",
    "hive_encryption_paths",
    "hive_endpoints",
    "hive_entry",
    "hive_l3_entry",
    "hive_xdp_entry",
    "hive_epoch",
    "hive_links",
    "hive_node",
    "hive_passage",
    "hive_nodeport",
    "hive_pod_networks",
    "hive_policies",
    "hive_policy_prefixes",
    "hive_sock",
    "hive_tunnel",
}


async def test_a_first_start_makes_and_pins_every_map(in_node: None) -> None:
    async with agent() as node:
        assert pins() == node.maps.created == ALL
        assert {table.spec.name for table in node.maps.all()} == ALL
        inner = node.maps.policies.spec.inner
        assert inner is not None
        assert inner.max_entries == 256
    assert pins() == ALL


async def test_a_restart_takes_the_maps_over_with_their_contents(in_node: None) -> None:
    async with agent() as node:
        node.maps.node.update(bytes(4), b"n" * 96)
        before = {table.spec.name: table.id for table in node.maps.all()}
    async with agent() as node:
        assert node.maps.created == frozenset()
        assert {table.spec.name: table.id for table in node.maps.all()} == before
        assert node.maps.node.lookup(bytes(4)) == b"n" * 96


async def test_metrics_pinned_by_another_hand_are_corrected(in_node: None) -> None:
    GLOBALS.mkdir(parents=True)
    with create_map(MapSpec("cilium_metrics", MapType.PERCPU_HASH, 8, 16, 1024, 0)) as wrong:
        pin(wrong.fd, GLOBALS / "cilium_metrics")
    async with agent(preallocate_bpf_maps=True) as node:
        assert node.maps.metrics.spec.flags == 1


UNUSED = Path("/sys/fs/bpf/cilium/unused")


def of_services(maps: Maps, _: PolicyMaps) -> None:
    """Cells that need some maps."""
    maps.use("services4", "services6", "snat4", "snat6")


def placeholders() -> set[str]:
    return {path.name for path in UNUSED.iterdir()}


@pytest.mark.parametrize("ipv6", [False, True])
async def test_a_map_that_nothing_uses_is_not_made(ipv6: bool, in_node: None) -> None:
    async with agent(of_services, enable_ipv6=ipv6) as node:
        used = {table.spec.name for table in node.maps.used()}
        assert {name for name in pins() if not name.startswith("cilium_policy_")} == used
        assert used == ALL - node.maps.unused
        assert {"cilium_ct4_global", "cilium_lb4_services_v2", "cilium_snat_v4_external"} <= used
        other = {"cilium_ct6_global", "cilium_ipv6_frag_datagrams", "cilium_lb6_services_v2"}
        assert used & other == (other if ipv6 else set())
        assert not used & {"cilium_lb4_reverse_sk", "cilium_tunnel_map", "cilium_lb4_maglev"}
        assert {table.spec.name for table in node.maps.conntrack} == {
            name for name in used if name.startswith("cilium_ct")
        }
        assert placeholders() == node.maps.unused
        assert {table.spec.max_entries for table in node.maps.all() if table not in node.maps.used()} == {1}


async def test_placeholders_are_the_same_after_a_restart(in_node: None) -> None:
    async with agent(of_services) as node:
        before = {table.spec.name: table.id for table in node.maps.all()}
    async with agent(of_services) as node:
        assert {table.spec.name: table.id for table in node.maps.all()} == before


async def test_a_placeholder_follows_the_layout_of_its_map(in_node: None) -> None:
    async with agent(of_services) as node:
        before = node.maps.maglev4.id, node.maps.reverse_sk4.id
    async with agent(of_services, bpf_lb_maglev_table_size=251) as node:
        assert node.maps.maglev4.id != before[0]
        assert node.maps.maglev4.spec.inner is not None
        assert node.maps.maglev4.spec.inner.value_size == 4 * 251
        assert node.maps.reverse_sk4.id == before[1]


async def test_a_map_that_is_no_longer_used_goes_once_other_programs_are_in_force(in_node: None) -> None:
    async with agent(enable_ipv6=True) as node:
        node.maps.ct6_tcp.update(bytes(38), bytes(56))
        number = node.maps.ct6_tcp.id
    async with agent(of_services) as node:
        assert pins() >= {"cilium_ct6_global", "cilium_tunnel_map"}  # which programs in force use until then
        await node.maps.remove_retired()
        assert pins() & ALL == ALL - node.maps.unused
        assert node.maps.ct6_tcp.id != number
    async with agent(enable_ipv6=True) as node:
        await node.maps.remove_retired()
        assert (pins() & ALL, placeholders()) == (ALL, set())
        assert node.maps.ct6_tcp.lookup(bytes(38)) is None


async def test_turned_back_before_it_went_it_has_its_entries(in_node: None) -> None:
    async with agent(enable_ipv6=True) as node:
        node.maps.ct6_tcp.update(bytes(38), bytes(56))
    async with agent(of_services):
        pass  # and never got its programs in force
    async with agent(enable_ipv6=True) as node:
        assert node.maps.ct6_tcp.lookup(bytes(38)) == bytes(56)


async def test_asking_for_a_map_too_late_or_for_none_is_refused(in_node: None) -> None:
    async with agent(of_services) as node:
        with pytest.raises(RuntimeError, match=r"^ipmasq4: the maps are open"):
            node.maps.use("ipmasq4")
        node.maps.use("services4", "snat4")  # as a cell does that is enabled again
        with pytest.raises(AttributeError, match="no_such_map"):
            node.maps.use("no_such_map")


PUBLIC = {
    "cilium_ct4_global": ("lru_hash", 14, 56),
    "cilium_ct6_global": ("lru_hash", 38, 56),
    "cilium_ct_any4_global": ("lru_hash", 14, 56),
    "cilium_ct_any6_global": ("lru_hash", 38, 56),
    "cilium_egress_gw_policy_v4": ("lpm_trie", 12, 8),
    "cilium_events": ("perf_event_array", 4, 4),
    "cilium_ipcache": ("lpm_trie", 24, 12),
    "cilium_ipmasq_v4": ("lpm_trie", 8, 1),
    "cilium_ipmasq_v6": ("lpm_trie", 20, 1),
    "cilium_ipv4_frag_datagrams": ("lru_hash", 12, 4),
    "cilium_ipv6_frag_datagrams": ("lru_hash", 40, 4),
    "cilium_encrypt_state": ("array", 4, 1),
    "cilium_l2_responder_v4": ("hash", 8, 8),
    "cilium_lb4_affinity": ("lru_hash", 16, 16),
    "cilium_lb4_backends_v3": ("hash", 4, 12),
    "cilium_lb4_maglev": ("hash_of_maps", 2, 4),
    "cilium_lb4_reverse_nat": ("hash", 2, 6),
    "cilium_lb4_reverse_sk": ("lru_hash", 16, 8),
    "cilium_lb4_services_v2": ("hash", 12, 12),
    "cilium_lb4_source_range": ("lpm_trie", 12, 1),
    "cilium_lb6_affinity": ("lru_hash", 24, 16),
    "cilium_lb6_backends_v3": ("hash", 4, 24),
    "cilium_lb6_maglev": ("hash_of_maps", 2, 4),
    "cilium_lb6_reverse_nat": ("hash", 2, 18),
    "cilium_lb6_reverse_sk": ("lru_hash", 32, 20),
    "cilium_lb6_services_v2": ("hash", 24, 12),
    "cilium_lb6_source_range": ("lpm_trie", 24, 1),
    "cilium_lb_affinity_match": ("hash", 8, 1),
    "cilium_lxc": ("hash", 20, 48),
    "cilium_metrics": ("percpu_hash", 8, 16),
    "cilium_node_map_v2": ("hash", 20, 4),
    "cilium_nodeport_neigh4": ("lru_hash", 4, 8),
    "cilium_nodeport_neigh6": ("lru_hash", 16, 8),
    "cilium_policy_00001": ("lpm_trie", 12, 24),
    "cilium_runtime_config": ("array", 4, 8),
    "cilium_skip_lb4": ("hash", 16, 1),
    "cilium_skip_lb6": ("hash", 32, 1),
    "cilium_snat_v4_external": ("lru_hash", 14, 40),
    "cilium_snat_v6_external": ("lru_hash", 38, 56),
    "cilium_tunnel_map": ("hash", 20, 20),
}
"""Type, key and value size in bytes, of every map that tools open by its path."""


async def test_the_tools_of_the_field_see_the_sizes(in_node: None) -> None:
    async with agent() as node:
        with create_map(policy_spec(1, 256)) as policy:
            pin(policy.fd, GLOBALS / "cilium_policy_00001")
        assert {name for name in pins() if name.startswith("cilium_")} == PUBLIC.keys()
        found = {}
        for name in PUBLIC:
            shown = await anyio.run_process(["bpftool", "-j", "map", "show", "pinned", str(GLOBALS / name)])
            described = json.loads(shown.stdout)
            found[name] = described["type"], described["bytes_key"], described["bytes_value"]
        assert found == PUBLIC
        assert node.maps.lxc.spec.max_entries == 65535


async def test_a_map_the_kernel_refuses_is_one_clear_line(in_node: None) -> None:
    made = Hive(config.cell, maps.cell, invoke(use), settings=dict(SMALL))
    GLOBALS.mkdir(parents=True)
    (GLOBALS / "cilium_lxc").mkdir()  # not a map at all
    with pytest.raises(Exception) as failed:  # noqa: PT011  (start errors are groups)
        async with made.started():
            pass
    text = explain(failed.value)
    assert text is not None
    assert text.startswith("cannot open /sys/fs/bpf/tc/globals/cilium_lxc: ")
    assert "\n" not in text


async def test_a_nat_map_larger_than_the_conntrack_maps_of_the_node_is_refused(in_node: None) -> None:
    """The conntrack maps follow from the node's memory: the least that they get."""
    settings = {"bpf-map-dynamic-size-ratio": 0.000001, "bpf-nat-global-max": 196609}
    with pytest.raises(StartError, match="bpf-nat-global-max=196609: expected at most 196608, the entries"):
        async with Hive(config.cell, maps.cell, invoke(use), settings=settings).started():
            pass


def test_reading_a_map_before_the_start_raises_an_error() -> None:
    made = Maps.__new__(Maps)
    with pytest.raises(NotStartedError, match=r"Maps\.lxc was read before the hook 'open the maps' ran"):
        _ = made.lxc
    assert not hasattr(made, "no_such_map")
