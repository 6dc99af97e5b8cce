"""A real runtime: containerd brings pods up and down through our plugin, as a kubelet would ask it to."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.lab import agent_process, pods
from hive.lab.flows import tcp_listener
from hive.lab.namespaces import Namespaces
from hive.lab.node import Lab
from hive.lab.probe import ping, tcp_echo, tcp_echo_server
from tests.support.containerd import Containerd
from tests.support.namespaces import inside
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


@pytest.fixture
def runtime(lab: Lab) -> Iterator[Containerd]:
    """A containerd inside the node, its folders on the node's own tmpfs."""
    folder = lab.directory / "containerd"
    plugins = folder / "plugins"
    plugins.mkdir(parents=True)
    for plugin in (pods.PLUGIN, Path("/usr/lib/cni/loopback")):
        shutil.copy(plugin, plugins)
    with Containerd(folder, plugins, lab.cni_conf.parent, functools.partial(start, lab)) as made:
        yield made


def start(lab: Lab, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a program in the node; by nsenter, since gRPC's threads do not survive a fork of ours."""
    enter = ["nsenter", f"--mount={lab.directory / 'mnt'}", f"--net={lab.directory / 'net'}", "--"]
    return subprocess.Popen(
        [*enter, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_sandboxes_talk_outlive_an_agent_and_leave_nothing(lab: Lab, runtime: Containerd) -> None:
    first, second = runtime.run("web-0"), runtime.run("web-1")
    assert host_links(lab) == 2
    assert_they_talk(runtime, first, second)

    agent_process.crash(lab)
    assert_they_talk(runtime, first, second)
    agent_process.wait_ready(lab, agent_process.start(lab))
    assert_they_talk(runtime, first, second)
    third = runtime.run("web-2")
    assert_they_talk(runtime, third, first)

    for sandbox in (first, second, third):
        runtime.remove(sandbox)
    eventually(lambda: host_links(lab) == 0)
    assert saved_endpoints(lab) == []


def assert_they_talk(runtime: Containerd, source: str, target: str) -> None:
    """Ping and TCP from one sandbox to the other, by the address the CRI reports."""
    address = runtime.address(target)
    with sandbox(runtime, source) as client, sandbox(runtime, target) as server:
        assert client.run(ping, address, 3) != []
        with inside(server):
            listener = tcp_listener()
        with listener:
            answering = server.start(tcp_echo_server, listener)
            client.run(tcp_echo, (address, listener.getsockname()[1]))
            assert answering.finish(within=10) == [runtime.address(source)]


def sandbox(runtime: Containerd, name: str) -> Namespaces:
    """The sandbox's network namespace."""
    return Namespaces.open(f"/proc/{runtime.pid(name)}/ns/net")


def host_links(lab: Lab) -> int:
    """How many pod links the node has."""
    with lab.open() as node:
        return node.run(count_links)


def count_links() -> int:
    """Links of pods in the caller's network namespace."""
    return len(list(Path("/sys/class/net").glob("lxc*")))


def saved_endpoints(lab: Lab) -> list[str]:
    """The endpoints whose state is on the node's disk."""
    with lab.open() as node:
        return node.run(list_states)


def list_states() -> list[str]:
    """Names below the caller's state directory."""
    return sorted(entry.name for entry in Path("/run/cilium/state").iterdir())
