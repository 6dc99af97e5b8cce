"""A lab node with socket load balancing has its own cgroup, which is removed with it."""

import os

import pytest

from hive.lab.cgroups import remove, settings_of
from tests.support.cgroups import unified

pytestmark = pytest.mark.kernel


def test_the_machines_processes_are_left_alone() -> None:
    name = f"test-{os.getpid()}"
    group = unified() / f"hive-lab-{name}"
    assert settings_of(name, ["--debug=true"]) == []
    assert settings_of(name, ["--bpf-lb-sock=true", "--cgroup-root=/elsewhere"]) == []
    assert not group.exists()
    for asked in ("--bpf-lb-sock=true", "--kube-proxy-replacement"):
        assert settings_of(name, [asked]) == [f"--cgroup-root={group}"]
        assert group.is_dir()
        remove(name)
        assert not group.exists()
    remove(name)
