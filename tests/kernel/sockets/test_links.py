"""Links of socket programs survive the agent, are replaced in place, restored, and removed when disabled."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import anyio
import pytest

from cells.maps.bpf import CgroupLinkInfo, link_info, open_link
from cells.services.sockets.links import HOOKS, detach_all, find_root
from lifecycle import explain
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, Backend
from tests.kernel.sockets.place import PINS, serving
from tests.support.cgroups import cgroup, join
from tests.support.namespaces import in_node
from tests.support.waiting import eventually

__all__ = ["cgroup", "in_node"]
pytestmark = pytest.mark.kernel


def links() -> dict[str, CgroupLinkInfo]:
    """What is pinned, by name of the program."""
    found = {}
    for path in PINS.iterdir():
        descriptor = open_link(path)
        info = link_info(descriptor)
        os.close(descriptor)
        assert info is not None
        found[path.name] = info
    return found


def is_served() -> bool:
    """Whether a client of the service is sent to its backend."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        caller.bind(("127.0.0.1", 0))
        try:
            caller.connect((VIP, PORT))
        except OSError:
            return False
        text = Path("/proc/net/udp").read_text(encoding="ascii")
        return f"0100007F:{TARGET:04X}" in text


@pytest.mark.anyio
async def test_a_restart_leaves_every_link_as_it_is(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        before = links()
        assert before.keys() == HOOKS.keys()
        assert is_served()
    assert is_served()  # no agent runs
    async with serving(cgroup):
        assert links() == before


def test_an_agent_killed_at_once_leaves_clients_served(in_node: None, cgroup: Path) -> None:
    async def live(ready: int) -> None:
        async with serving(cgroup) as node:
            node.services.serve(VIP, [Backend(1, "127.0.0.1")])
            os.write(ready, b"1")
            await anyio.sleep_forever()

    async def live_again() -> dict[str, CgroupLinkInfo]:
        async with serving(cgroup):
            assert is_served()
            return links()

    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        anyio.run(live, writable)
    assert os.read(readable, 1) == b"1"
    before = links()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    join(cgroup)
    assert is_served()
    assert anyio.run(live_again) == before


@pytest.mark.anyio
async def test_other_maps_replace_the_programs_within_their_links(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        before = links()
    async with serving(cgroup, bpf_lb_map_max="1000"):
        after = links()
        assert {name: info.id for name, info in after.items()} == {
            name: info.id for name, info in before.items()
        }
        assert after["cil_sock4_connect"].program != before["cil_sock4_connect"].program
        assert is_served()


@pytest.mark.anyio
async def test_detached_cgroup_programs_are_attached_again(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        taken = links()["cil_sock4_connect"].id
        await anyio.run_process(["bpftool", "link", "detach", "id", str(taken)])
        (PINS / "cil_sock4_sendmsg").unlink()
        assert not is_served()
        await node.sockets.compare()
        assert is_served()
        assert node.sockets.found == 2
        assert links().keys() == HOOKS.keys()
        await node.sockets.compare()
        assert node.sockets.found == 2


@pytest.mark.anyio
async def test_another_control_group_is_served_instead(in_node: None, cgroup: Path) -> None:
    other = cgroup / "other"
    other.mkdir()
    async with serving(cgroup):
        pass
    async with serving(other) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        assert {info.cgroup for info in links().values()} == {find_root(other).id}
        assert is_served()
        join(cgroup)
        assert not is_served()


@pytest.mark.anyio
async def test_with_bpf_lb_sock_off_no_program_is_attached(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        assert is_served()
    async with serving(cgroup, bpf_lb_sock="false"):
        assert not is_served()
        assert list(PINS.iterdir()) == []
        assert detach_all(PINS) == []


@pytest.mark.anyio
async def test_removing_the_pins_takes_the_programs_off(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
    for path in PINS.iterdir():
        path.unlink()  # as hive cleanup does
    eventually(lambda: not is_served())


@pytest.mark.anyio
async def test_a_cgroup_root_that_is_not_a_cgroup_is_reported(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup, cgroup_root="/etc") as node:
        with pytest.raises(Exception, match="mount cgroup v2 there") as failed:
            await node.sockets.compare()
        assert explain(failed.value) is not None


@pytest.mark.anyio
async def test_a_missing_cgroup_mount_is_created(in_node: None, cgroup: Path) -> None:
    root = find_root(Path("/run/cgroup-of-its-own"))
    assert (root.path / "cgroup.procs").exists()
    assert root.is_whole
