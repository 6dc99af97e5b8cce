"""Kill the agent and start another build of the datapath, while traffic is measured."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hive.lab import agent_process
from hive.lab.demo.transcript import Transcript
from hive.lab.kernel import BPFObjects, bpf_objects
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.pods import Attached
from hive.lab.traffic.flows import (
    Received,
    Sent,
    Streamed,
    family_of,
    tcp_listener,
    tcp_receiver,
    tcp_sender,
    udp_receiver,
    udp_sender,
    udp_socket,
)

RATE = 1000.0
"""UDP packets per second."""
BEFORE, WITHOUT, AFTER = 1.0, 1.0, 1.0
"""Seconds of traffic before the kill, without any agent, and after the new one serves."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Results: the BPF objects before and after, the traffic, and durations in seconds."""

    before: BPFObjects
    after: BPFObjects
    sent: Sent
    received: Received
    written: Streamed
    read: Streamed
    without_agent: float
    start: float

    @property
    def lost(self) -> int:
        """Number of lost UDP packets."""
        return self.sent.packets - self.received.packets


def second_build(lab: Lab) -> Path:
    """Write the datapath's objects into the lab with another tag, which makes them a new generation."""
    from cells.datapath.build import tagged
    from cells.datapath.settings import PACKAGED_OBJECTS

    return tagged(PACKAGED_OBJECTS / "datapath.o", lab.directory / "datapath.o", f"lab-{lab.name}"[:31])


def upgrade(
    lab: Lab, source: Attached, target: Attached, datapath_object: Path, settings: Sequence[str] = ()
) -> Upgrade:
    """Kill the agent and start one with ``datapath_object``, during traffic from ``source`` to ``target``.

    ``settings`` are those of the running agent.
    """
    address = target.ipv4 or target.ipv6
    family = family_of(address)
    with lab.open() as node, lab.open_pod(source.pod) as sending, lab.open_pod(target.pod) as receiving:
        before = node.run(bpf_objects)
        with inside(receiving):
            datagrams, listener = udp_socket(family), tcp_listener(family)
        with datagrams, listener:
            udp_in = receiving.start(udp_receiver, datagrams)
            tcp_in = receiving.start(tcp_receiver, listener)
            udp_out = sending.start(udp_sender, (address, datagrams.getsockname()[1]), RATE)
            tcp_out = sending.start(tcp_sender, (address, listener.getsockname()[1]))
        children = (udp_out, tcp_out, udp_in, tcp_in)
        try:
            time.sleep(BEFORE)
            agent_process.crash(lab)
            killed = time.monotonic()
            time.sleep(WITHOUT)
            pid = agent_process.start(lab, f"--datapath-object={datapath_object}", *settings)
            start = agent_process.wait_ready(lab, pid)
            without_agent = time.monotonic() - killed
            time.sleep(AFTER)
            after = node.run(bpf_objects)
            sent, written = udp_out.finish(within=30), tcp_out.finish(within=30)
            received, read = udp_in.finish(within=30), tcp_in.finish(within=30)
        finally:
            for child in children:
                child.kill()
    return Upgrade(before, after, sent, received, written, read, without_agent, start)


def report(transcript: Transcript, seen: Upgrade) -> None:
    """Check the results line by line, and record the numbers."""
    transcript.check(
        "killed with -9, and a new agent serves",
        True,
        f"{seen.without_agent:.1f} s without one, {seen.start * 1000:.0f} ms of them its start",
    )
    _report_objects(transcript, seen)
    _report_traffic(transcript, seen)
    transcript.measured["upgrade"] = {
        "seconds_without_agent": round(seen.without_agent, 3),
        "agent_start_seconds": round(seen.start, 3),
        "map_ids": {pin: [id_, seen.after.maps.get(pin)] for pin, id_ in seen.before.persistent_maps.items()},
        "program_ids": [sorted(kernel.entries.values()) for kernel in (seen.before, seen.after)],
        "udp": {"rate": RATE, "lost": seen.lost, **asdict(seen.received), "sent": seen.sent.packets},
        "tcp": {"written": seen.written.octets, **asdict(seen.read)},
    }


def _report_objects(transcript: Transcript, seen: Upgrade) -> None:
    lasting = seen.before.persistent_maps
    unchanged = {pin: id_ for pin, id_ in lasting.items() if seen.after.maps.get(pin) == id_}
    missing = ", ".join(sorted(lasting.keys() - unchanged.keys()))
    transcript.check(
        "the maps are the same",
        unchanged == lasting,
        f"{len(unchanged)} of {len(lasting)} keep their id" + (f"; not {missing}" if missing else ""),
    )
    old, new = set(seen.before.entries.values()), set(seen.after.entries.values())
    transcript.check("the programs are new", bool(new) and not old & new, f"{ids(old)} became {ids(new)}")
    fixed = seen.before.dispatchers == seen.after.dispatchers
    transcript.check(
        "nothing was attached again",
        fixed and bool(seen.before.dispatchers),
        f"the links keep dispatchers {ids(seen.before.dispatchers.values())}",
    )


def _report_traffic(transcript: Transcript, seen: Upgrade) -> None:
    transcript.check(
        "no UDP packet was lost",
        seen.lost == 0 and seen.sent.packets > 0 and seen.sent.errors == 0,
        f"{seen.sent.packets} sent, {seen.received.packets} received, {seen.lost} lost; "
        f"longest gap {seen.received.longest_gap * 1000:.0f} ms",
    )
    transcript.check(
        "the TCP connection went on",
        seen.read.continuous and seen.read.octets == seen.written.octets > 0,
        f"{seen.written.octets / 1e6:.1f} MB written, {seen.read.octets / 1e6:.1f} MB read, every byte in "
        f"its place; longest stall {seen.read.longest_stall * 1000:.0f} ms",
    )


def ids(numbers: Iterable[int]) -> str:
    """Return kernel ids as text."""
    return ", ".join(map(str, sorted(numbers))) or "none"
