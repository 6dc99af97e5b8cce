"""What a packet takes of the datapath of an agent with Hubble, against one without: BPF_PROG_TEST_RUN.

Needs: root, the lab, the compiled plugin.   Gives: measure.
Each round has a node of each kind at once, with the agent's own settings, monitor aggregation among them. The
same packet of an established flow between two pods runs through both in turns.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from statistics import median

from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from cells.maps.bpf import program_by_id, test_run
from cells.netlink.links import programs_of
from hive.lab import pods
from hive.lab.node import Lab
from tests.bench.nodes import our_lab
from tests.bench.packets import CALLS, HOPS, RUNS
from tests.bench.stats import Figure, Row, Sample
from tests.kernel.datapath.world import OK, REDIRECT

TURNS = 20
"""Turns of each node in a round, with fewer calls each."""
TARGET = 1.0
"""ns that Hubble may add to a packet."""


def _took(link: str, packet: bytes) -> float:
    """Return the ns per packet that a pod sends by this link. Raises RuntimeError if it is dropped."""
    ifindex = socket.if_nametoindex(link)
    program = program_by_id(programs_of([ifindex])[ifindex].ingress)
    took = []
    try:
        for _ in range(CALLS // TURNS + 1):
            run = test_run(program, packet, ifindex=ifindex, repeat=RUNS)
            if run.retval not in {OK, REDIRECT}:
                raise RuntimeError(f"{link}: the packet was not let through, but {run.retval}")
            took.append(run.duration_ns)
    finally:
        os.close(program)
    return median(took[1:])  # the first is run by a cold processor


def _flow(made: Lab) -> tuple[str, bytes]:
    """Create two pods of a node: return the link of one, and its packet to the other."""
    sender, receiver = pods.add(made, "a"), pods.add(made, "b")
    packet = Ether(src=sender.pod_mac, dst=sender.host_mac) / IP(src=sender.ipv4, dst=receiver.ipv4, ttl=HOPS)
    return sender.host_link, bytes(packet / UDP(sport=40000, dport=53) / b"payload")


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Return ns per packet with and without Hubble, and the difference, a value a round."""
    del folder
    found: dict[bool, list[float]] = {False: [], True: []}
    for index in range(rounds):
        nodes = our_lab("bench-plain"), our_lab("bench-hubble", "--enable-hubble=true")
        with nodes[0] as (plain, _), nodes[1] as (hubble, _):
            turns: dict[bool, list[float]] = {False: [], True: []}
            with plain.open() as without, hubble.open() as having:
                places = [(False, without, *_flow(plain)), (True, having, *_flow(hubble))]
                for turn in range(TURNS):
                    for kind, inside, link, packet in places[:: 1 if (turn + index) % 2 else -1]:
                        turns[kind].append(inside.run(_took, link, packet))
        for kind, values in turns.items():
            found[kind].append(median(values))
    what = "a packet of a flow between pods"
    more = tuple(one - other for one, other in zip(found[True], found[False], strict=True))
    return [
        Row(
            f"Hubble, {what}",
            "ns",
            Sample(tuple(found[True])),
            "without",
            Sample(tuple(found[False])),
            None,
            faster=False,
        ),
        Figure(f"Hubble, added to {what}", "ns", Sample(more), TARGET),
    ]
