"""An upgrade of the datapath under traffic, with the agent killed for it, loses nothing."""

from __future__ import annotations

import random

import pytest

from hive.lab import agent_process, pods
from hive.lab.demo.upgrade import RATE, second_build, upgrade
from hive.lab.namespaces import inside
from hive.lab.node import Lab, wait_exited
from hive.lab.traffic.flows import udp_receiver, udp_sender, udp_socket
from tests.support.account import agreed
from tests.support.agents import serving

pytestmark = pytest.mark.node


def test_an_upgrade_loses_nothing(lab: Lab) -> None:
    source, target = pods.add(lab, "source"), pods.add(lab, "target")
    seen = upgrade(lab, source, target, second_build(lab))
    assert seen.sent.packets > 2 * RATE
    assert seen.sent.errors == 0
    assert seen.lost == 0
    assert (seen.received.duplicates, seen.received.reordered) == (0, 0)
    assert seen.read.continuous
    assert seen.read.octets == seen.written.octets > 0
    assert seen.after.persistent_maps == seen.before.persistent_maps
    assert seen.after.dispatchers == seen.before.dispatchers
    assert not set(seen.after.entries.values()) & set(seen.before.entries.values())
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {source.ipv4, target.ipv4}


def test_upgrades_cut_short_anywhere_lose_nothing(lab: Lab) -> None:
    chance = random.Random(4)  # noqa: S311 (the same moments each time, as far as that goes)
    source, target = pods.add(lab, "source"), pods.add(lab, "target")
    builds: tuple[list[str], list[str]] = ([f"--datapath-object={second_build(lab)}"], [])
    agent_process.crash(lab)
    with lab.open_pod("source") as sending, lab.open_pod("target") as receiving:
        with inside(receiving):
            datagrams = udp_socket()
        with datagrams:
            arriving = receiving.start(udp_receiver, datagrams)
            leaving = sending.start(udp_sender, (target.ipv4, datagrams.getsockname()[1]), RATE)
            for turn in range(12):
                pid = agent_process.start(lab, *builds[turn % 2])
                wait_exited(pid, chance.uniform(0.2, 0.5))  # the datapath is swapped about then
                agent_process.crash(lab)
            serving(lab, *builds[0])
            sent, received = leaving.finish(within=60), arriving.finish(within=60)
    assert sent.packets > RATE
    assert (sent.errors, sent.packets - received.packets) == (0, 0)
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {source.ipv4, target.ipv4}
