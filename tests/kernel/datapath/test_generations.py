"""Successive program generations on a forwarding node: the maps stay, the programs change."""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cells.datapath import programs as known
from cells.datapath.build import SOURCES
from cells.datapath.generation import active_constants, read_constants, set_entry
from cells.datapath.libbpf import LoadError
from cells.datapath.programs import ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS
from cells.maps.bpf import open_program, program_by_id, program_info
from cells.maps.bpf import test_run as run
from cells.maps.map import open_map, possible_cpus
from cells.maps.records.flows import DeviceConfig, MetricsKey
from cells.netlink.links import HostLinks
from cells.netlink.rows import LinkInfo
from lifecycle import HiveError, StartError
from tests.kernel.datapath.node import LiveNode, running
from tests.kernel.datapath.traffic import Flow, flow, lost
from tests.support.compiled import another_build, compiled
from tests.support.namespaces import in_node
from tests.support.waiting import eventually

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

PINS = Path("/sys/fs/bpf")
DISPATCHERS = set(known.DISPATCHERS)
GENERATION = set(ENTRIES)
ON_A_NODE_ALONE = ("hive_from_pod", "hive_to_pod", "hive_from_host", "hive_to_host")
"""The programs that packets pass which do not leave the node."""


@pytest.fixture(scope="module")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another build of the same source."""
    return another_build(tmp_path_factory.mktemp("other"))


def map_ids(node: LiveNode) -> dict[str, int]:
    return {table.spec.name: table.id for table in node.maps.all()}


def entries() -> dict[int, int]:
    """Program ids in hive_entry, by slot."""
    with open_map(PINS / "tc/globals/hive_entry") as entry:
        found = {struct.unpack("<I", k)[0]: struct.unpack("<I", v)[0] for k, v in entry.items()}
    return {slot: program for slot, program in found.items() if program}


def attached(device: str) -> set[int]:
    """Ids of the programs on a device's clsact, as tc shows them."""
    ids = set()
    for hook in ("ingress", "egress"):
        shown = subprocess.run(
            ["tc", "-json", "filter", "show", "dev", device, hook], check=True, capture_output=True
        )
        ids |= {row["options"]["prog"]["id"] for row in json.loads(shown.stdout) if "options" in row}
    return ids


async def test_the_first_start_makes_the_first_generation(in_node: None) -> None:
    async with running() as node:
        assert node.datapath.generation == 1
        assert node.datapath.programs.keys() == DISPATCHERS | GENERATION
        programs = node.datapath.programs
        assert entries() == {slot: programs[name] for name, slot in ENTRIES.items()}
        for name in DISPATCHERS:
            assert program_info(open_program(PINS / "cilium/dispatch" / name)).id == programs[name]


async def test_another_build_replaces_programs_and_nothing_else(in_node: None, other_build: Path) -> None:
    async with running() as node:
        node.add_host()
        pod = node.add_pod(10)
        before, maps_before, build = dict(node.datapath.programs), map_ids(node), node.datapath.build
        on_pod, on_host = attached(pod.link), attached("cilium_host")
    async with running(datapath_object=other_build) as node:
        after = node.datapath.programs
        assert (node.datapath.generation, map_ids(node)) == (2, maps_before)
        assert node.datapath.build != build
        assert {name: after[name] for name in DISPATCHERS} == {name: before[name] for name in DISPATCHERS}
        assert not {after[name] for name in GENERATION} & set(before.values())
        assert set(entries().values()) == {after[name] for name in GENERATION}
        assert (attached(pod.link), attached("cilium_host")) == (on_pod, on_host)
        with open_map(PINS / "tc/globals/hive_entry") as entry:
            constants = active_constants(entry)
        assert constants is not None
        assert (constants.tag, constants.build, constants.generation) == ("other", node.datapath.build, 2)
        eventually(lambda: all(vanished(before[name]) for name in GENERATION))


def vanished(program: int) -> bool:
    try:
        program_by_id(program)
    except OSError:
        return True
    return False


async def test_the_same_build_on_the_same_maps_is_left_alone(in_node: None) -> None:
    async with running() as node:
        before = dict(node.datapath.programs)
    async with running() as node:
        assert (node.datapath.generation, dict(node.datapath.programs)) == (1, before)


@pytest.mark.parametrize(
    "settings",
    [{"bpf_ct_timeout_regular_any": "90s"}, {"bpf_ct_global_any_max": 2048}],
    ids=["constants", "a map made anew"],
)
async def test_other_settings_need_another_generation(in_node: None, settings: dict[str, object]) -> None:
    async with running() as node:
        before, build = dict(node.datapath.programs), node.datapath.build
    async with running(**settings) as node:
        assert (node.datapath.generation, node.datapath.build) == (2, build)
        assert node.datapath.programs["hive_from_pod"] != before["hive_from_pod"]
        in_use = program_info(program_by_id(node.datapath.programs["hive_from_pod"])).map_ids
        assert node.maps.ct4_any.id in in_use


async def test_a_replacement_cut_short_is_finished(in_node: None, other_build: Path) -> None:
    async with running() as node:
        earlier = program_by_id(node.datapath.programs["hive_to_host"])
    async with running(datapath_object=other_build) as node:
        set_entry(node.maps.entry, ENTRIES["hive_to_host"], earlier)
    os.close(earlier)
    async with running(datapath_object=other_build) as node:
        found = [program_info(program_by_id(program)) for program in entries().values()]
        constants = [read_constants(map_id) for info in found for map_id in info.map_ids]
        assert [one.build for one in constants if one] == [node.datapath.build] * len(GENERATION)


async def test_a_missing_dispatcher_entry_is_restored(in_node: None) -> None:
    async with running() as node:
        node.maps.entry.delete(struct.pack("<I", 2))
    async with running() as node:
        assert node.datapath.generation == 2
        assert entries().keys() == set(ENTRIES.values())


async def test_removed_entries_and_pins_are_restored(in_node: None) -> None:
    async with running() as node:
        node.add_host()
        before, on_host = entries(), attached("cilium_host")
        assert await node.datapath.repair() == []
        with open_map(PINS / "tc/globals/hive_entry") as entry:
            entry.delete(struct.pack("<I", 1))
        (PINS / "cilium/dispatch/cil_to_host").unlink()
        assert await node.datapath.repair() == ["cil_to_host", "hive_to_host"]
        assert await node.datapath.repair() == []
        assert entries().keys() == before.keys()
        assert set(entries().values()) == {node.datapath.programs[name] for name in GENERATION}
        assert node.datapath.generation == 2
        assert attached("cilium_host") == on_host
        with open_map(PINS / "tc/globals/hive_entry") as entry:
            for slot in ENTRIES.values():
                entry.delete(struct.pack("<I", slot))
        assert set(await node.datapath.repair()) == GENERATION
        assert (node.datapath.generation, entries().keys()) == (3, before.keys())


async def test_no_packet_is_lost_while_generations_change(in_node: None, other_build: Path) -> None:
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
    with flow(one, two) as traffic:
        sent, received = traffic
        eventually(lambda: len(received) > 100)
        for step in range(3):
            settings = {} if step % 2 else {"datapath_object": other_build}
            async with running(**settings):
                pass
        so_far = len(sent)
        eventually(lambda: len(sent) > so_far + 100)
    assert lost(traffic) == set()


def await_more(traffic: Flow, packets: int) -> None:
    """Until so many have been sent from now on."""
    until = len(traffic[0]) + packets
    eventually(lambda: len(traffic[0]) > until)


async def test_programs_of_two_generations_forward_side_by_side(in_node: None, other_build: Path) -> None:
    async with running() as node:
        node.add_host()
        one, two = node.add_pod(10), node.add_pod(11)
        old = {slot: program_by_id(node.datapath.programs[name]) for name, slot in ENTRIES.items()}
    async with running(datapath_object=other_build) as node:
        new = {slot: program_by_id(node.datapath.programs[name]) for name, slot in ENTRIES.items()}
        with flow(one, two) as pods, flow(None, one) as down, flow(two, None) as up:
            eventually(lambda: all(len(received) > 50 for _, received in (pods, down, up)))
            for mixture in [*range(1 << len(ON_A_NODE_ALONE)), 0]:
                for bit, slot in enumerate(ENTRIES[name] for name in ON_A_NODE_ALONE):
                    set_entry(node.maps.entry, slot, (new if mixture >> bit & 1 else old)[slot])
                await_more(pods, 50)
        assert [lost(traffic) for traffic in (pods, down, up)] == [set(), set(), set()]
        for descriptor in [*old.values(), *new.values()]:
            os.close(descriptor)


def unbounded(_: Path) -> Path:
    """All programs, of which one reads what may be outside of the packet."""
    return compiled(Path(__file__).with_name("unbounded.c"), SOURCES)


def opened(path: Path) -> Path:
    """The datapath without its test of where a pod's packets come from."""
    copy = path / "bpf"
    shutil.copytree(SOURCES, copy)
    text = (copy / "pod/egress.h").read_text(encoding="ascii")
    refusal = "return DROP(EGRESS, DROP_INVALID_SOURCE);"
    assert refusal in text
    (copy / "pod/egress.h").write_text(text.replace(refusal, "{}"))
    return compiled(copy / "datapath.c")


def of_drivers(_: Path) -> Path:
    """An object with the same constants and other programs."""
    return PACKAGED_OBJECTS / "xdp.o"


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (unbounded, "refused by the kernel: Permission denied: .*outside of the packet"),
        (opened, "hive_from_pod fails its self-check, a source that is not the pod's: .*expected .132."),
        (of_drivers, "has no program hive_from_host, hive_from_pod"),
    ],
    ids=["verifier", "self-check", "missing program"],
)
async def test_a_failed_build_leaves_the_previous_programs_attached(
    in_node: None, tmp_path: Path, build: Callable[[Path], Path], complaint: str
) -> None:
    async with running():
        before = entries()
    with pytest.raises(StartError) as caught:
        async with running(datapath_object=build(tmp_path)):
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, LoadError)
    assert caught.group_contains(LoadError, match=complaint)
    assert "\n" not in str(error)
    assert entries() == before


def rows_tried() -> dict[str, int]:
    """Maps in which packets that are tried leave something, and how many rows they have."""
    found = {}
    for name in (
        "hive_endpoints",
        "cilium_lxc",
        "cilium_metrics",
        "cilium_ct4_global",
        "cilium_ct_any4_global",
    ):
        with open_map(PINS / "tc/globals" / name) as table:
            found[name] = len(list(table.keys()))
    return found


async def test_the_first_build_is_tried_on_the_nodes_maps_which_are_empty_afterwards(
    in_node: None, tmp_path: Path
) -> None:
    with pytest.raises(StartError) as caught:
        async with running(datapath_object=opened(tmp_path)):
            pass
    assert caught.group_contains(LoadError, match="hive_from_pod fails its self-check")
    assert entries() == {}
    assert rows_tried() == dict.fromkeys(rows_tried(), 0)
    async with running() as node:
        assert entries() == {slot: node.datapath.programs[name] for name, slot in ENTRIES.items()}
        assert rows_tried() == dict.fromkeys(rows_tried(), 0)


async def test_maps_that_are_in_use_are_not_tried_on(in_node: None, tmp_path: Path) -> None:
    async with running() as node:
        counter = MetricsKey(reason=0, direction=1).pack()
        node.maps.metrics.update(counter, bytes(node.maps.metrics.spec.value_size * possible_cpus()))
    with open_map(PINS / "tc/globals/hive_entry") as entry:
        for slot in ENTRIES.values():  # nothing is in force, as after a kill before that
            entry.delete(struct.pack("<I", slot))
    async with running() as node:
        assert node.maps.metrics.lookup(counter) is not None
        assert entries() == {slot: node.datapath.programs[name] for name, slot in ENTRIES.items()}


async def test_a_file_that_is_not_an_object_is_refused(in_node: None, tmp_path: Path) -> None:
    file = tmp_path / "text.o"
    file.write_text("not an object")
    with pytest.raises(StartError) as caught:
        async with running(datapath_object=file):
            pass
    assert caught.group_contains(HiveError, match="text.o is not an eBPF object libbpf can read")
    with pytest.raises(StartError) as caught:
        async with running(datapath_object=tmp_path / "absent.o"):
            pass
    assert caught.group_contains(
        HiveError, match="datapath-object=.*absent.o: No such file or directory; expected"
    )


async def test_other_dispatchers_replace_those_attached(in_node: None) -> None:
    async with running() as node:
        node.add_host()
        one, two = node.add_pod(10), node.add_pod(11)
        before = dict(node.datapath.programs)
    forget_dispatchers()
    with flow(one, two) as traffic:
        eventually(lambda: len(traffic[1]) > 100)
        async with running() as node:
            after = node.datapath.programs
            assert not {after[name] for name in DISPATCHERS} & set(before.values())
            assert attached(one.link) == attached(two.link) == {after["cil_from_container"]}
            assert attached("cilium_host") == {after["cil_to_host"], after["cil_from_host"]}
            assert attached("cilium_net") == {after["cil_to_host"]}
    assert lost(traffic) == set()


async def test_devices_may_be_removed_while_dispatchers_are_replaced(
    in_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = ("uplink", "cilium_host")
    async with running() as node:
        node.add_host()
        add_veth("uplink")
        device = node.links.find("uplink")
        assert device is not None
        node.maps.devices.update(struct.pack("<I", device.ifindex), DeviceConfig(device.mac).pack())
    forget_dispatchers()
    listed = HostLinks.links

    def removed_once_listed(links: HostLinks, without: tuple[str, ...] = ()) -> list[LinkInfo]:
        found = listed(links, without)
        for name in devices:
            subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)
        return found

    monkeypatch.setattr(HostLinks, "links", removed_once_listed)
    async with running() as node:
        assert node.datapath.generation


async def test_generic_xdp_ends_with_its_setting_also_as_dispatchers_are_replaced(in_node: None) -> None:
    loopback = 1  # its driver has no XDP
    async with running(bpf_lb_acceleration="generic") as node:
        node.maps.devices.update(struct.pack("<I", loopback), DeviceConfig(bytes(6)).pack())
        node.datapath.attach_device(loopback)
        node.datapath.attach_xdp(loopback)
    forget_dispatchers()
    async with running() as node:
        node.datapath.detach_xdp(loopback)
        assert node.links.xdp(loopback) == (0, 0)


def add_veth(name: str) -> None:
    subprocess.run(["ip", "link", "add", name, "type", "veth"], check=True)


def forget_dispatchers() -> None:
    """As after an upgrade that changed them: the pins no longer vouch for them."""
    for name in DISPATCHERS:
        (PINS / "cilium/dispatch" / name).unlink()


async def test_without_its_entry_a_dispatcher_drops_on_pods_and_passes_on_the_host(in_node: None) -> None:
    async with running() as node:
        for slot in ENTRIES.values():
            node.maps.entry.delete(struct.pack("<I", slot))
        frame = bytes(12) + b"\x86\xdd" + bytes(60)
        verdicts = {
            name: run(program_by_id(node.datapath.programs[name]), frame).retval for name in DISPATCHERS
        }
        assert verdicts == {
            "cil_from_container": 2,
            "cil_to_container": 2,
            "cil_from_host": 0,
            "cil_to_host": 0,
            "cil_from_overlay": 2,
            "cil_to_overlay": 0,
            "cil_from_netdev": 0,
            "cil_to_netdev": 0,
            "cil_from_netdev_l3": 0,
            "cil_to_netdev_l3": 0,
            "cil_xdp_entry": 2,  # XDP_PASS
        }
        assert node.drops().keys() == {140}
