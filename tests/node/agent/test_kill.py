"""The agent killed with SIGKILL at any moment: the next one finds complete endpoints or none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.kernel import machine_links
from hive.lab.node import Lab, wait_exited
from hive.lab.traffic.probe import ping
from tests.support.account import agreed
from tests.support.agents import Ended, call_environment, ended, invoke, serving, start_plugin
from tests.support.points import EVERY

pytestmark = pytest.mark.node

PODS = [f"pod-{number}" for number in range(12)]
SECONDS = 7.0
BURST, START = 0.12, 0.6
"""Seconds a burst takes, and a start, at most: the kill comes somewhere in it."""

SIGHTS = ("/sys/class/net", "/sys/fs/bpf/tc/globals", "/run/cilium/state")
"""Directories that change in the middle of an add or a delete: links, pinned policy maps, saved endpoints."""


def killer(stop: Stop, pid: int, changes: int, directory: str, delay: float) -> None:
    """Kill the agent the moment a directory has changed so often, or after a delay in seconds."""
    deadline = time.monotonic() + delay
    seen = os.listdir(directory)  # noqa: PTH208 (often, and names only)
    while changes and time.monotonic() < deadline and not stop.wait(0):
        now = os.listdir(directory)  # noqa: PTH208
        changes -= now != seen
        seen = now
    os.kill(pid, signal.SIGKILL)


def start_and_kill(lab: Lab, seconds: float) -> None:
    """Start an agent, and kill it after so long."""
    pid = agent_process.start(lab)
    wait_exited(pid, seconds)
    agent_process.crash(lab)


def link_of(lab: Lab, pod: str) -> str:
    return "lxc" + sha256(f"{pods.container_id(lab, pod)}:eth0".encode()).hexdigest()[:12]


def unanswered(addresses: list[str]) -> list[str]:
    return [address for address in addresses if not ping(address, 1)]


class Runtime:
    """Adds what it has not and deletes what it has."""

    def __init__(self, lab: Lab, chance: random.Random) -> None:
        self.lab = lab
        self.chance = chance
        self.attached: dict[str, str] = {}
        """Pods and their addresses, as the plugin answered."""

    def burst(self) -> dict[str, tuple[str, subprocess.Popen[bytes]]]:
        """Start a call for most pods, all at once."""
        chosen = self.chance.sample(PODS, self.chance.randint(len(PODS) // 2, len(PODS)))
        calls = {}
        for pod in chosen:
            command = "DEL" if pod in self.attached else "ADD"
            # An add has to outlast agents that are killed one after the other.
            plugin = pods.PLUGIN if command == "ADD" else None
            environment = call_environment(self.lab, pod, command)
            calls[pod] = command, start_plugin(self.lab, environment, plugin=plugin)
        return calls

    def collect(self, calls: dict[str, tuple[str, subprocess.Popen[bytes]]]) -> None:
        """Note what the calls answered."""
        for pod, (command, process) in calls.items():
            done = ended(process)
            assert done.code == 0, done  # whatever became of the agent in the middle of it
            if command == "DEL":
                del self.attached[pod]
            else:
                self.attached[pod] = done.json["ips"][0]["address"].partition("/")[0]

    def compare(self) -> None:
        """What the node has is what we know of, complete; and it works."""
        listed = {link: address for address, link, _ in agreed(self.lab).listed.values()}
        known = {link_of(self.lab, pod): address for pod, address in self.attached.items()}
        assert listed == known
        with self.lab.open() as node:
            assert node.run(unanswered, list(known.values())) == []


def torment(lab: Lab, runtime: Runtime, chance: random.Random) -> None:
    """A burst, a kill in it, sometimes kills of the agents that start next, and a look at what is there."""
    pid = agent_process.running(lab)
    with lab.open() as node:
        directory = chance.choice(SIGHTS)
        kill = node.start(killer, pid, chance.randint(0, 2 * len(PODS)), directory, chance.uniform(0, BURST))
        calls = runtime.burst()
        kill.result(within=60)
    agent_process.crash(lab)
    while chance.random() < 0.3:
        start_and_kill(lab, chance.uniform(0, START))
    serving(lab)
    runtime.collect(calls)
    runtime.compare()


@pytest.mark.parametrize("seed", [1, 2] if EVERY else [1])
def test_a_killed_agent_leaves_whole_endpoints_or_none(node: Lab, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 (the same moments each time, as far as that goes)
    for pod in PODS:
        node.hold_pod(pod)
    runtime = Runtime(node, chance)
    serving(node)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        torment(node, runtime, chance)
    for pod in PODS:
        assert invoke(node, pod, "DEL").code == 0
    assert agreed(node).listed == {}
    for pod in PODS:
        with node.open_pod(pod) as inside:
            assert inside.run(machine_links) == {"lo"}


ROLL_OUT = [f"web-{number}" for number in range(50)]


def kill_every_second(lab: Lab, stop: threading.Event, killed: threading.Semaphore) -> None:
    """Kill each agent a second after its start, or soon after it serves if that is later; until ``stop``."""
    while True:
        pid, deadline = agent_process.start(lab), time.monotonic() + 1.0
        agent_process.wait_ready(lab, pid)
        if stop.wait(max(0.2, deadline - time.monotonic())):
            return
        agent_process.crash(lab)
        killed.release()


def test_a_roll_out_of_fifty_pods_does_not_notice_an_agent_killed_every_second(node: Lab) -> None:
    for pod in ROLL_OUT:
        node.hold_pod(pod)
    serving(node)
    agent_process.crash(node)
    stop, killed = threading.Event(), threading.Semaphore(0)
    done: list[Ended] = []
    with ThreadPoolExecutor() as pool:
        killer = pool.submit(kill_every_second, node, stop, killed)
        try:
            commands = ["ADD"]
            while commands or not killed.acquire(blocking=False):
                commands = commands or ["DEL", "ADD"]
                environment = [call_environment(node, pod, commands[0]) for pod in ROLL_OUT]
                calls = [start_plugin(node, each, plugin=pods.PLUGIN) for each in environment]
                done = [ended(call) for call in calls]
                assert [one for one in done if one.code] == []
                del commands[0]
        finally:
            stop.set()
        killer.result(timeout=90)
    answered = {one.json["ips"][0]["address"].partition("/")[0] for one in done}
    assert {ip for ip, _, _ in agreed(node).listed.values()} == answered
    with node.open() as inside:
        assert inside.run(unanswered, sorted(answered)) == []
