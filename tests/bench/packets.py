"""Datapath time of each packet, by BPF_PROG_TEST_RUN: no interface, no queue, no wake-up.

The kernel runs the program repeatedly on one packet and decrements its hop limit, which limits a call. The
kernel's own loop, some 30 ns a run, is included.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6

from cells.maps.bpf import test_run
from tests.bench.stats import Figure, Row, Sample
from tests.kernel.datapath.packets import from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import NODE, OK, REDIRECT, A, B, Pod, World

HOPS, RUNS = 255, 250
"""Of a packet, and of the program in one call."""
CALLS = 1000
POD, HOST = "hive_from_pod", "hive_from_host"
TARGET = 150
"""Limit in ns for a packet of an established flow between pods, either way, with policy enforced."""


def flow(world: World) -> dict[str, tuple[Pod, str, bytes]]:
    """Return packets by their kind, of flows to the world that are established: sender, program, bytes."""
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S"))
    world.pod_sends(B, from_pod(B) / tcp(B.ip, A.ip, "SA", sport=80, dport=40000))
    world.pod_sends(A, from_pod(A) / tcp(A.ip, NODE, "S", sport=40001))
    world.pod_sends(A, from_pod(A) / tcp(A.ip6, B.ip6, "S"))
    world.pod_sends(B, from_pod(B) / tcp(B.ip6, A.ip6, "SA", sport=80, dport=40000))
    packets = {
        "pod to pod, TCP, established": (A, POD, from_pod(A) / tcp(A.ip, B.ip, "A")),
        "pod to pod, TCP, reply": (B, POD, from_pod(B) / tcp(B.ip, A.ip, "A", sport=80, dport=40000)),
        "pod to pod, UDP, established": (A, POD, from_pod(A) / udp(A.ip, B.ip)),
        "pod to pod, TCP over IPv6, established": (A, POD, from_pod(A) / tcp(A.ip6, B.ip6, "A")),
        "pod to pod, TCP over IPv6, reply": (
            *(B, POD),
            from_pod(B) / tcp(B.ip6, A.ip6, "A", sport=80, dport=40000),
        ),
        "pod to its node, TCP": (A, POD, from_pod(A) / tcp(A.ip, NODE, "A", sport=40001)),
        "node to its pod, TCP, reply": (A, HOST, from_host() / tcp(NODE, A.ip, "A", sport=80, dport=40001)),
    }
    for _, _, packet in packets.values():
        if IPv6 in packet:
            packet[IPv6].hlim = HOPS
        else:
            packet[IP].ttl = HOPS
    return {what: (pod, program, bytes(packet)) for what, (pod, program, packet) in packets.items()}


def ns_a_packet(world: World, sender: Pod, program: str, packet: bytes) -> float:
    """Return the median over many calls. Raises RuntimeError if a packet is dropped."""
    world.pod_sends(sender, packet)  # and makes the interface the sender's
    took = []
    for _ in range(CALLS):
        run = test_run(world.programs[program], packet, repeat=RUNS)
        if run.retval not in {OK, REDIRECT}:
            raise RuntimeError(f"{program}: the packet was not let through, but {run.retval}")
        took.append(run.duration_ns)
    return median(took)


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Return ns per packet of each kind, and packets per second of the first, a value a round."""
    del folder
    found: dict[str, list[float]] = defaultdict(list)
    with World() as world:
        for index in range(rounds + 1):
            world.reset()
            for what, (sender, program, packet) in flow(world).items():
                took = ns_a_packet(world, sender, program, packet)
                if index:  # the first round warms up
                    found[what].append(took)
    rows: list[Row | Figure] = [
        Figure(what, "ns", Sample(tuple(values)), TARGET if what.startswith("pod to pod") else None)
        for what, values in found.items()
    ]
    first = next(iter(found.values()))
    rows.append(
        Figure("packets a second on one processor", "million", Sample(tuple(1e3 / ns for ns in first)))
    )
    return rows
