"""A crash test: an agent's work is recorded once, then interrupted before chosen system calls.

A point is the number of a call in a recorded run: the agent is killed before the kernel executes it. The last
point is one beyond: the agent is killed after it has done everything and is idle. A run that does not reach
its point fails the test.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyroute2  # noqa: F401 (or each forked child would import it)

from hive.lab import agent_process, pods
from hive.lab.kernel import machine_links
from hive.lab.namespaces import inside
from hive.lab.node import Lab, wait_exited
from hive.lab.pods import Attached
from hive.lab.traffic.flows import udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import interfaces, ping
from tests.support.account import agreed
from tests.support.agents import serving
from tests.support.crash.interposer import Interposer
from tests.support.waiting import eventually

SEED = int(os.environ.get("CRASH_SEED", "1"))
POINTS = int(os.environ.get("CRASH_POINTS", "1"))
"""Number of points that a test tries; 0 for all."""
SURVIVORS = 2
"""Pods that exist all the time."""
RATE = 200.0
"""Packets per second between these pods."""
WITHIN = 60.0
"""Seconds within which an agent must reach its point."""

_OTHERS = re.compile(
    r"cilium_policy_\d+$|/state/\d+(/|$)|^lxc|/cilium-cni\.log$|/(agent-runtime|viper-agent)-config-[12]\.\w+$"
)
"""Files that are not compared: pods' own, which are accounted for elsewhere, the plugin's log, and settings
of the last two starts.
"""


class Drill:
    """Agents of one node with counted calls, and the pods that must survive everything."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self._interposer = Interposer(directory)
        self._survivors: dict[str, str] = {}
        self._clean: frozenset[str] = frozenset()
        self._target = 0

    def close(self) -> None:
        """End the agent and its supervisor."""
        agent_process.crash(self.lab)
        self._interposer.close()

    @contextmanager
    def survivors(self) -> Iterator[None]:
        """Send packets between two pods during the block; not one may be lost."""
        serving(self.lab)
        source, target = pods.add(self.lab, "source"), pods.add(self.lab, "target")
        self._survivors = {one.pod: one.ipv4 for one in (source, target)}
        agent_process.crash(self.lab)
        with self._talking(source, target):
            yield
        serving(self.lab)

    @contextmanager
    def _talking(self, source: Attached, target: Attached) -> Iterator[None]:
        with self.lab.open_pod(source.pod) as sending, self.lab.open_pod(target.pod) as receiving:
            with inside(receiving):
                datagrams = udp_socket()
            with datagrams:
                arriving = receiving.start(udp_receiver, datagrams)
                leaving = sending.start(udp_sender, (target.ipv4, datagrams.getsockname()[1]), RATE)
            try:
                yield
                sent, received = leaving.finish(within=60), arriving.finish(within=60)
            finally:
                leaving.kill()
                arriving.kill()
        assert sent.packets > 0
        assert (sent.errors, sent.packets - received.packets) == (0, 0)

    # Starts

    def start(self, *settings: str) -> int:
        """Start an agent with counted calls; return their number once it serves and is idle."""
        self._target = 0
        agent_process.wait_ready(self.lab, self._interposer.start(self.lab, *settings))
        return self._interposer.rest()

    def record_start(self, *settings: str) -> list[str]:
        """Return the number of calls of a start, until the agent serves and is idle. The agent is ended
        afterwards.
        """
        count = self.start(*settings)
        lines = self.counted_lines[:count]
        agent_process.crash(self.lab)
        return lines

    def cut_start(self, number: int, last: int, *settings: str) -> None:
        """Start an agent that is killed before this call, or when it is idle if there are fewer calls."""
        if number > last:
            self.start(*settings)
            agent_process.crash(self.lab)
            return
        self._target = number
        self._interposer.start(self.lab, *settings, kill_at=number)
        self.expect_cut()

    # What a serving agent does

    @property
    def counted_lines(self) -> list[str]:
        """Return the last agent's counted calls: number, name, object."""
        return [line for line in self._interposer.lines if line[0].isdecimal()]

    @property
    def made(self) -> int:
        """Return the number of counted calls once the last agent is idle."""
        return self._interposer.rest()

    @property
    def counted(self) -> int:
        """Return the number of the last agent's counted calls so far."""
        return self._interposer.counted

    def cut_after(self, calls: int) -> None:
        """Kill the idle agent before the n-th call from now on; 1 is its next one."""
        self._interposer.rest()
        self._target = self._interposer.kill_after(calls)

    def expect_cut(self) -> None:
        """Wait for the agent's death at its point; AssertionError if the point was not reached."""
        pid = agent_process.running(self.lab)
        ended = pid is None or wait_exited(pid, WITHIN)
        counted = self._interposer.counted
        log = agent_process.log_end(self.lab)
        agent_process.crash(self.lab)
        assert ended, f"not killed: it rests after {counted} calls, before its point {self._target}\n{log}"
        assert counted == self._target, f"ended after {counted} calls, before its point {self._target}\n{log}"

    # Judgement

    def keep_in_mind(self) -> None:
        """Record the node's present state, with a serving agent, as the expected state after each
        interruption.
        """
        agreed(self.lab)
        self._clean = self._holding()

    def whole(self, *more: str) -> None:
        """Check that the serving agent, the kernel and the disk have the surviving pods and these addresses,
        nothing else.

        The surviving pods respond, and have their addresses.
        """
        expected = {*self._survivors.values(), *more}
        assert {ip for ip, _, _ in agreed(self.lab).listed.values()} == expected
        if self._clean:
            self._check_leftovers()
        for pod, address in self._survivors.items():
            with self.lab.open() as node, self.lab.open_pod(pod) as held:
                assert node.run(ping, address, 1), f"{pod} does not answer"
                (eth0,) = (one for one in held.run(interfaces) if one.name == "eth0")
            assert f"{address}/32" in eth0.addresses

    def _check_leftovers(self) -> None:
        try:
            eventually(lambda: self._holding() == self._clean)
        except AssertionError:
            now = self._holding()
            over, missing = sorted(now - self._clean), sorted(self._clean - now)
            raise AssertionError(f"left over: {over}; missing: {missing}") from None

    def _holding(self) -> frozenset[str]:
        with self.lab.open() as node:
            return node.run(_holding, str(self.lab.cni_conf.parent))


def _holding(*places: str) -> frozenset[str]:
    """Return files, pins, links and addresses of the node itself."""
    found = {
        str(entry)
        for place in ("/run/cilium", "/sys/fs/bpf", *places)
        for entry in Path(place).rglob("*")
        if entry.suffix != ".debug"
    }
    # Another node has another router address, but one.
    addresses = {f"{one.name} has {len(one.addresses)} addresses" for one in interfaces()}
    return frozenset(name for name in found | addresses | machine_links() if not _OTHERS.search(name))


def chosen(what: str, first: int, last: int) -> list[int]:
    """Choose the points to try from ``first`` to ``last``, and the one beyond; prints them with the seed."""
    every = range(first, last + 1)
    assert every, f"{what}: no calls were recorded"
    chance = random.Random(f"{SEED} {what}")  # noqa: S311 (the same points each time)
    sure = every[: len(every) - len(every) // 25]  # two threads may both ask what the kernel can do, or one
    points = list(every) if POINTS == 0 else sorted(chance.sample(sure, min(POINTS, len(sure))))
    print(f"{what}: calls {first} to {last}; CRASH_SEED={SEED}; killed before {points} and at rest")  # noqa: T201
    return [*points, last + 1]
