"""The agent's own settings and its lock on the node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cells.config import (
    AgentSettings,
    check_bpffs,
    check_directory,
    check_ipv6,
    lock_file,
    writable,
    write_pidfile,
)
from lifecycle import Hive, HiveError, SettingsError, Sources, config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_ipv4": False, "enable_ipv6": False}, "a pod needs an address"),
        ({"mtu": 100}, "576 to 65535"),
        ({"state_dir": Path("relative")}, "absolute path"),
        ({"state_dir": Path("/" + "x" * 95)}, "expected at most 95 bytes"),
        ({"socket_path": Path("relative.sock")}, "absolute path"),
        ({"socket_path": Path("/" + "x" * 107)}, "expected at most 107 bytes"),
        ({"cluster_name": ""}, "invalid cluster name"),
        ({"cluster_name": "Prod_1"}, "invalid cluster name"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        AgentSettings(**settings).validate()  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_the_defaults_are_accepted() -> None:
    AgentSettings().validate()
    AgentSettings(state_dir=Path("/" + "x" * 94), cluster_name="a" * 32).validate()


def test_a_bpf_root_that_is_not_bpffs_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(HiveError, match=f"mount -t bpf bpf {tmp_path}"):
        check_bpffs(tmp_path)


def test_a_socket_needs_its_directory(tmp_path: Path) -> None:
    check_directory("socket-path", tmp_path / "api.sock")
    with pytest.raises(
        HiveError, match=f"socket-path {tmp_path}/x/api.sock: {tmp_path}/x is not a directory; "
    ):
        check_directory("socket-path", tmp_path / "x/api.sock")


def test_a_second_agent_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    pidfile = tmp_path / "cilium.pid"
    first = lock_file(tmp_path / "agent.lock", "state-dir", pidfile)
    write_pidfile(pidfile)
    with pytest.raises(
        HiveError, match=rf"\(pid {os.getpid()}\) has the same state-dir, {tmp_path}: stop it"
    ):
        lock_file(tmp_path / "agent.lock", "state-dir", pidfile)
    os.close(first)
    os.close(lock_file(tmp_path / "agent.lock", "state-dir", pidfile))


def test_a_directory_can_be_locked_too(tmp_path: Path) -> None:
    first = lock_file(tmp_path / "", "bpf-root")
    with pytest.raises(HiveError, match="another agent has the same bpf-root"):
        lock_file(tmp_path, "bpf-root")
    os.close(first)


def test_a_directory_that_cannot_be_created_is_reported_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with (
        pytest.raises(
            HiveError, match=rf"^state-dir {tmp_path} is not usable: {tmp_path}/state: File exists; "
        ),
        writable("state-dir", tmp_path),
    ):
        (tmp_path / "state").mkdir()


def test_ipv6_needs_a_kernel_that_has_it_on(tmp_path: Path) -> None:
    with pytest.raises(HiveError, match="this kernel has no IPv6"):
        check_ipv6(tmp_path)
    switch = tmp_path / "net/ipv6/conf/all/disable_ipv6"
    switch.parent.mkdir(parents=True)
    switch.write_text("1\n")
    with pytest.raises(HiveError, match=r"set net\.ipv6\.conf\.all\.disable_ipv6=0"):
        check_ipv6(tmp_path)
    switch.write_text("0\n")
    check_ipv6(tmp_path)


def test_all_invalid_settings_are_reported_at_once(tmp_path: Path) -> None:
    hive = Hive(config(AgentSettings), settings=Sources(["--mtu=1", "--cluster-name=-", "--bpf-root=x"]))
    with pytest.raises(SettingsError) as refusal:
        hive.check()
    assert [fault.text.partition(":")[0] for fault in refusal.value.faults] == [
        "--mtu=1",
        "--bpf-root=x",
        "--cluster-name=-",
    ]
