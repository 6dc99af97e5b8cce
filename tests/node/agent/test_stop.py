"""SIGTERM at any time: an orderly stop, uninterrupted traffic, and a next agent that changes nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.demo.upgrade import second_build
from hive.lab.kernel import bpf_objects
from hive.lab.node import Lab, wait_exited
from hive.lab.traffic.probe import ping
from tests.support.account import agreed, in_kernel
from tests.support.agents import call_environment, ended, invoke, serving, start_plugin, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUN = Path("/run/cilium")


def left_at_the_end() -> set[str]:
    """What an agent that has ended leaves no trace of."""
    return {"cilium.sock", "cni.sock", "cilium.pid"} & {path.name for path in RUN.iterdir()}


def ended_in_order(lab: Lab, code: int) -> None:
    assert code == 0, agent_process.log_end(lab, 40)
    with lab.open() as inside:
        assert inside.run(left_at_the_end) == set()
    log = lab.agent_log.read_text()
    assert "Traceback" not in log
    assert "level=error" not in log


def pings(lab: Lab, source: pods.Attached, target: pods.Attached) -> int:
    with lab.open_pod(source.pod) as inside:
        return len(inside.run(ping, target.ipv4, 3))


def test_a_stop_leaves_pods_talking_and_a_start_changes_nothing(lab: Lab) -> None:
    pid = agent_process.running(lab)
    assert pid is not None
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    with lab.open() as inside:
        before, listed = inside.run(in_kernel), agreed(lab)
        ended_in_order(lab, terminated(lab, pid))
        assert inside.run(in_kernel) == before
        assert pings(lab, first, second) == 3
        assert len(inside.run(ping, second.ipv4, 3)) == 3

        serving(lab)
        assert inside.run(in_kernel) == before
    assert agreed(lab) == listed
    assert pods.add(lab, "third").gateway == first.gateway
    assert pings(lab, second, first) == 3


def test_another_build_swaps_the_programs_and_nothing_else(lab: Lab) -> None:
    pid = agent_process.running(lab)
    assert pid is not None
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    other = second_build(lab)
    with lab.open() as inside:
        before = inside.run(bpf_objects)
        ended_in_order(lab, terminated(lab, pid))
        serving(lab, f"--datapath-object={other}")
        after = inside.run(bpf_objects)
    assert after.persistent_maps == before.persistent_maps
    assert after.dispatchers == before.dispatchers
    assert not set(after.entries.values()) & set(before.entries.values())
    assert pings(lab, first, second) == 3
    assert len(agreed(lab).listed) == 2


def test_a_stop_in_the_middle_of_a_start(node: Lab) -> None:
    chance = random.Random(3)  # noqa: S311 (the same moments each time, as far as that goes)
    serving(node)
    first, second = pods.add(node, "first"), pods.add(node, "second")
    listed = agreed(node)
    agent_process.crash(node)
    with node.open() as inside:
        before = inside.run(in_kernel)
        for moment in (*(chance.uniform(0.05, 0.6) for _ in range(8)), 0.0):
            spoken = node.agent_log.stat().st_size
            pid = agent_process.start(node)
            if wait_exited(pid, moment):
                raise AssertionError(agent_process.log_end(node))
            code = terminated(node, pid)
            if "node claimed" in node.agent_log.read_text()[spoken:]:
                ended_in_order(node, code)
            else:  # what the killed agent has left is not its own to clear away
                assert code in {0, -signal.SIGTERM}, "Python itself may not have begun"
            assert inside.run(in_kernel) == before
            assert pings(node, first, second) == 3
    pid = serving(node)
    assert agreed(node) == listed
    pods.add(node, "third")
    ended_in_order(node, terminated(node, pid))


def test_a_stop_in_the_middle_of_a_burst(lab: Lab) -> None:
    names = [f"pod-{number}" for number in range(12)]
    for name in names:
        lab.hold_pod(name)
    for name in names[:6]:
        assert invoke(lab, name, "ADD").code == 0
    pid = agent_process.running(lab)
    assert pid is not None
    calls = {}
    for number, name in enumerate(names):
        command = "DEL" if number < 6 else "ADD"
        calls[name] = start_plugin(lab, call_environment(lab, name, command), plugin=pods.PLUGIN)
        if number == 8:
            os.kill(pid, signal.SIGTERM)
    assert wait_exited(pid, 60)
    ended_in_order(lab, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    serving(lab)
    assert {name: ended(call).code for name, call in calls.items()} == dict.fromkeys(names, 0)
    assert len(agreed(lab).listed) == 6
    for name in names:
        assert invoke(lab, name, "DEL").code == 0
    assert agreed(lab).listed == {}


def stay_connected(stop: Stop) -> None:
    """Connect everywhere and say nothing, or ask once and stay."""
    with ExitStack() as connections:
        for name, kind in (("cilium.sock", socket.SOCK_STREAM), ("cni.sock", socket.SOCK_SEQPACKET)):
            connections.enter_context(socket.socket(socket.AF_UNIX, kind)).connect(str(RUN / name))
        for family, address in (
            (socket.AF_UNIX, str(RUN / "cilium.sock")),
            (socket.AF_INET, ("127.0.0.1", 9879)),
        ):
            asking = connections.enter_context(socket.socket(family, socket.SOCK_STREAM))
            asking.connect(address)
            asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert asking.recv(1 << 16).startswith(b"HTTP/1.1 ")
        (RUN / "connected").touch()
        stop.wait(600)


def test_clients_that_stay_connected_do_not_hold_it_up(lab: Lab) -> None:
    pid = agent_process.running(lab)
    assert pid is not None
    with lab.open() as inside:
        clients = inside.start(stay_connected)
        eventually(lambda: inside.run((RUN / "connected").exists))
        ended_in_order(lab, terminated(lab, pid))
        clients.finish(within=60)
    serving(lab)


def test_a_second_signal_ends_at_once(lab: Lab) -> None:
    pid = agent_process.running(lab)
    assert pid is not None
    pods.add(lab, "pod")
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGCONT)
    assert wait_exited(pid, 60)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in {0, 1}
    serving(lab)
    assert len(agreed(lab).listed) == 1
