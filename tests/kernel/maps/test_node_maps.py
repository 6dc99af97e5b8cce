"""The node's maps over starts and restarts."""

import anyio
import pytest

from cells import config, maps
from cells.maps import Maps, MapSpec, MapType, create_map, pin
from lifecycle import Hive, NotStartedError, explain, invoke
from tests.kernel.maps.nodes import GLOBALS, SMALL, agent, pins, use
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

ALL = {
    "cilium_ct4_global",
    "cilium_ct6_global",
    "cilium_ct_any4_global",
    "cilium_ct_any6_global",
    "cilium_events",
    "cilium_ipcache",
    "cilium_ipv4_frag_datagrams",
    "cilium_ipv6_frag_datagrams",
    "cilium_lxc",
    "cilium_metrics",
    "hive_endpoints",
    "hive_entry",
    "hive_epoch",
    "hive_links",
    "hive_node",
    "hive_policies",
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


async def test_the_tools_of_the_field_see_the_sizes(in_node: None) -> None:
    async with agent():
        shown = await anyio.run_process(["bpftool", "map", "show", "pinned", str(GLOBALS / "cilium_lxc")])
    text = shown.stdout.decode()
    assert "hash  name cilium_lxc  flags 0x1" in text
    assert "key 20B  value 48B  max_entries 65535" in text


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


def test_reading_a_map_too_early_says_so() -> None:
    made = Maps.__new__(Maps)
    with pytest.raises(NotStartedError, match=r"Maps\.lxc was read before the hook 'open the maps' ran"):
        _ = made.lxc
    assert not hasattr(made, "no_such_map")
