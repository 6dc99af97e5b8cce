"""hive mount-cgroup and hive mount-bpffs: once, repeated, over another mount, for the node."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from hive import syscalls
from hive.init import mount_bpffs, mount_cgroup
from hive.lab.children import Child, Stop
from hive.lab.namespaces import new_node
from tests.support.waiting import eventually

pytestmark = pytest.mark.kernel


def call(command: object, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)  # type: ignore[arg-type]
    return result.exit_code, result.output


def test_cgroup_is_mounted_once(in_node: None, tmp_path: Path) -> None:
    target = str(tmp_path / "cgroupv2")
    assert call(mount_cgroup.command, target) == (0, f"mounted cgroup v2 on {target}\n")
    assert (Path(target) / "cgroup.controllers").exists()
    assert call(mount_cgroup.command, target) == (0, f"cgroup v2 is mounted on {target} already\n")


def test_another_filesystem_at_the_mount_point_is_reported_and_the_agent_starts(
    in_node: None, tmp_path: Path
) -> None:
    syscalls.mount("tmpfs", tmp_path, "tmpfs")
    code, output = call(mount_cgroup.command, str(tmp_path))
    assert code == 0
    assert output.startswith(f"hive: warning: cgroup v2 is not mounted on {tmp_path}: another filesystem")


def test_bpffs_is_mounted_once(in_node: None, tmp_path: Path) -> None:
    target = str(tmp_path / "bpf")
    assert call(mount_bpffs.command, target) == (0, f"mounted bpffs on {target}\n")
    assert syscalls.filesystem_type(target) == syscalls.BPF_FS_MAGIC
    assert call(mount_bpffs.command, target) == (0, f"bpffs is mounted on {target} already\n")


def test_a_failed_mount_of_bpffs_exits_1(in_node: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output = call(mount_bpffs.command, str(tmp_path / "file" / "bpf"))
    assert code == 1
    assert "bpffs is not mounted" in output


def test_a_container_mounts_for_the_node(tmp_path: Path) -> None:
    """The tool runs in namespaces of its own, and what it mounts appears in the node's."""
    target, entered = tmp_path / "cgroupv2", tmp_path / "entered"

    def waits(stop: Stop) -> None:
        entered.touch()
        stop.wait(300)

    with new_node() as node, new_node() as container:
        process = Child(waits, enter=node.enter)
        try:
            eventually(entered.exists)
            arguments = (f"--host-process=/proc/{process.pid}", str(target))
            assert container.run(call, mount_cgroup.command, *arguments)[0] == 0
            assert node.run(os.path.ismount, target)
            assert not container.run(os.path.ismount, target)
        finally:
            process.kill()
