"""Nodes and pods as namespaces: isolated, furnished, removed with their last holder."""

import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from hive import syscalls
from hive.lab.namespaces import hold, release
from tests.support.namespaces import (
    Child,
    Stop,
    in_forked_node,
    in_node,
    inside,
    need_root,
    new_netns,
    node_namespace,
    run_child,
)

__all__ = ["in_node"]  # a fixture

pytestmark = pytest.mark.node


def links() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_a_node_has_only_its_own_links_and_default_paths() -> None:
    with node_namespace() as node:
        assert node.run(links) == ["lo"]
        assert node.run(os.listdir, "/var/run/cilium") == []
        assert not {"tc", "cilium"} & set(node.run(os.listdir, "/sys/fs/bpf"))
        assert " - bpf " in node.run(mounts)
        assert node.run(os.listdir, "/sys/class/net") == ["lo"]


def test_what_one_step_leaves_the_next_one_finds_and_the_machine_never_sees() -> None:
    with node_namespace() as node:
        node.run(Path("/run/cilium/mark").touch)
        assert node.run(os.listdir, "/run/cilium") == ["mark"]
    assert not Path("/run/cilium/mark").exists()


def test_mounts_of_the_machine_are_left_alone() -> None:
    need_root()

    def machine() -> None:
        # A copy of the mounts without other writers, shared with its children as the machine's are.
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SHARED)

    def holds_a_node() -> None:
        before = mounts()
        with node_namespace():
            assert mounts() == before
        assert mounts() == before

    run_child(holds_a_node, enter=machine)


def test_a_node_can_be_made_while_others_remove_their_mounts() -> None:
    need_root()

    def mounts_and_removes(stop: Stop, directory: Path) -> None:
        mount_points = [directory / str(number) for number in range(5)]
        while not stop.wait(0):
            for path in mount_points:
                path.mkdir()
                syscalls.mount("none", path, "tmpfs")
            for path in reversed(mount_points):
                syscalls.unmount(path, syscalls.MNT_DETACH)
                path.rmdir()

    with tempfile.TemporaryDirectory(dir="/run") as below_run, ExitStack() as others:
        for name in ("one", "other"):
            directory = Path(below_run, name)
            directory.mkdir()
            others.callback(Child(mounts_and_removes, directory).finish, 30)
        for _ in range(100):
            with node_namespace():
                pass


@pytest.mark.usefixtures("in_node")
def test_a_whole_test_can_run_in_a_node(tmp_path: Path) -> None:
    assert links() == ["lo"]
    (tmp_path / "seen").touch()


@pytest.mark.anyio
@pytest.mark.usefixtures("in_node")
async def test_a_whole_async_test_can_run_in_a_node() -> None:
    assert links() == ["lo"]


def test_without_root_a_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.fail.Exception, match="needs root for namespaces and BPF"):
        need_root()


def test_a_failure_inside_propagates() -> None:
    need_root()

    def fails() -> None:
        assert links() == ["eth0"]

    with pytest.raises(AssertionError, match="eth0"):
        in_forked_node(fails)()


@pytest.mark.usefixtures("in_node")
def test_a_thread_can_step_into_a_pod_and_back() -> None:
    def network() -> int:
        return os.stat("/proc/thread-self/ns/net").st_ino  # noqa: PTH116

    before = network()
    with new_netns() as pod:
        with inside(pod):
            assert links() == ["lo"]
            assert network() != before
        assert network() == before


@pytest.mark.usefixtures("in_node")
def test_a_held_namespace_needs_no_process() -> None:
    path = Path("/run/cilium/pod")
    with new_netns() as pod:
        hold(pod.net, path)
        inode = os.fstat(pod.net).st_ino
    assert path.stat().st_ino == inode
    release(path)
    assert not path.exists()
