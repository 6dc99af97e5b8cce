"""The agent killed before calls that change something, found by interposing: nothing is half there."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hive.lab import agent_process, pods
from hive.lab.flows import udp_receiver, udp_sender, udp_socket
from hive.lab.namespaces import inside
from hive.lab.node import Lab, create, destroy, exclusive, wait_gone
from hive.lab.probe import ping
from hive.lab.upgrade import second_build
from tests.support.account import agreed
from tests.support.agents import invoke, serving
from tests.support.crash.interposer import Interposer

pytestmark = [pytest.mark.node, pytest.mark.timeout(120)]

SEED = int(os.environ.get("CRASH_SEED", "1"))
POINTS = int(os.environ.get("CRASH_POINTS", "5"))
"""Kill points a drill tries; 0 for all."""


class Drill:
    """One thing the agent does, done over and over and cut short, while two pods talk to each other."""

    def __init__(self, lab: Lab, interposer: Interposer) -> None:
        self.lab = lab
        self.interposer = interposer

    def started(self, *settings: str) -> int:
        """Start an agent whose calls are counted, and wait until it serves."""
        with self.interposer.watching():
            return serving(self.lab, *settings)

    def recorded(self, act: Callable[[], object]) -> int:
        """How many calls an agent makes for this, once it serves."""
        self.started()
        before = self.interposer.counted
        act()
        count = self.interposer.counted - before
        agent_process.crash(self.lab)
        return count

    def start_cut(self, number: int, *settings: str) -> None:
        """Start an agent that is killed before its call with this number."""
        with self.interposer.watching(number):
            pid = agent_process.start(self.lab, *settings)
        if not wait_gone(pid, 2):  # it serves, and made fewer calls this time
            agent_process.crash(self.lab)

    def count_of_start(self, *settings: str) -> int:
        """How many calls an agent makes until it serves."""
        self.started(*settings)
        count = self.interposer.counted
        agent_process.crash(self.lab)
        return count


def chosen(what: str, count: int) -> list[int]:
    """The points to try among so many; printed, with the seed that gives them again."""
    assert count > 0, what
    every = range(1, count + 1)
    chance = random.Random(f"{SEED} {what}")  # noqa: S311 (the same points each time)
    points = list(every) if POINTS == 0 else sorted(chance.sample(every, min(POINTS, count)))
    print(f"{what}: {count} calls; CRASH_SEED={SEED}; killed before {points}")  # noqa: T201 (told on failure)
    return points


@pytest.fixture
def drill(node: Lab, tmp_path: Path) -> Drill:
    return Drill(node, Interposer(tmp_path))


def whole(lab: Lab, addresses: set[str], point: object) -> None:
    """The next agent finds these pods and nothing else."""
    try:
        assert {ip for ip, _, _ in agreed(lab).listed.values()} == addresses
    except AssertionError as error:
        raise AssertionError(f"killed before {point}:\n{error}\n{agent_process.log_end(lab)}") from None


def test_first_start(drill: Drill) -> None:
    for number in chosen("first start", drill.count_of_start()):
        with exclusive():  # a start is a first one in a new node only
            destroy(drill.lab)
            create(drill.lab)
        drill.start_cut(number)
        serving(drill.lab)
        whole(drill.lab, set(), number)
        agent_process.crash(drill.lab)


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_add_and_delete(drill: Drill, command: str) -> None:
    lab = drill.lab
    lab.hold_pod("cut")

    def act() -> None:
        if command == "DEL":
            assert invoke(lab, "cut", "DEL").code == 0

    def prepared() -> None:
        serving(lab)
        if command == "DEL":
            assert invoke(lab, "cut", "ADD").code == 0
        agent_process.crash(lab)

    prepared()
    count = drill.recorded(act if command == "DEL" else lambda: invoke(lab, "cut", "ADD"))
    serving(lab)
    invoke(lab, "cut", "DEL")
    agent_process.crash(lab)
    for number in chosen(command, count):
        prepared()
        pid = drill.started()
        drill.interposer.kill_after(number)
        done = invoke(lab, "cut", command)
        wait_gone(pid, 1)
        agent_process.crash(lab)
        serving(lab)
        listed = agreed(lab).listed
        if command == "ADD" and done.code == 0:
            assert len(listed) == 1, number
        assert invoke(lab, "cut", "DEL").code == 0, number
        whole(lab, set(), number)
        again = invoke(lab, "cut", "ADD")
        assert again.code == 0, (number, again)
        assert invoke(lab, "cut", "DEL").code == 0
        agent_process.crash(lab)


@pytest.mark.parametrize("what", ["restore", "upgrade", "shutdown"])
def test_survivors(drill: Drill, what: str) -> None:
    lab = drill.lab
    serving(lab)
    source, target = pods.add(lab, "source"), pods.add(lab, "target")
    agent_process.crash(lab)
    builds = [f"--datapath-object={second_build(lab)}"] if what == "upgrade" else []

    def stop() -> None:
        pid = agent_process.running(lab)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        assert wait_gone(pid, 10)

    count = drill.recorded(stop) if what == "shutdown" else drill.count_of_start(*builds)
    points = chosen(what, count)
    with lab.open_pod("source") as sending, lab.open_pod("target") as receiving:
        with inside(receiving):
            datagrams = udp_socket()
        with datagrams:
            arriving = receiving.start(udp_receiver, datagrams)
            leaving = sending.start(udp_sender, (target.ipv4, datagrams.getsockname()[1]), 200.0)
            for number in points:
                if what == "shutdown":
                    drill.started()
                    drill.interposer.kill_after(number)
                    stop()
                    agent_process.crash(lab)
                else:
                    serving(lab)
                    agent_process.crash(lab)
                    drill.start_cut(number, *builds)
                serving(lab)
                whole(lab, {source.ipv4, target.ipv4}, number)
                with lab.open() as node:
                    assert node.run(ping, target.ipv4, 1)
                agent_process.crash(lab)
            sent, received = leaving.finish(within=30), arriving.finish(within=30)
    assert sent.packets > 0
    assert (sent.errors, sent.packets - received.packets) == (0, 0)
    serving(lab)
