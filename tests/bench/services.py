"""Connections through services: ours at sockets and by packets, against kube-proxy's rules and no service.

A client pod and a server pod on one node, one processor for each; the measured service is in the middle of
all. Node ports are measured from outside the node, masquerading towards it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hive.lab import pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS
from tests.bench import peers
from tests.bench.nodes import our_lab
from tests.bench.peers import Pair, inside, ip
from tests.bench.service_rules import (
    BACKENDS,
    NODE_PORT,
    PORT,
    ServiceLoad,
    iptables_rules,
    manifests,
    nft_rules,
)
from tests.bench.stats import Row, Sample
from tests.bench.tools import tool
from tests.bench.traffic import PORT as SERVED
from tests.bench.traffic import server
from tests.support.agents import known_pods
from tests.support.cgroups import unified
from tests.support.waiting import eventually

COUNTS = (10, 1000, 5000)
ROUND_TRIPS, CONNECTIONS = 10_000, 2_000
PEER_NODE, PEER_OUTSIDE = "192.168.61.10", "192.168.61.1"
FEWER = 1000
"""Number of services for iptables-nft, which needs minutes to load more."""


class Way(NamedTuple):
    """A path from a client to a service, and the preparation of the client."""

    client: Namespaces
    address: str
    port: int
    cgroup: Path | None = None


class Ways(NamedTuple):
    """The paths to one server."""

    service: Way
    direct: Way
    node_port: Way
    out: Way
    """From the pod to a server outside, behind the node's address."""


@contextlib.contextmanager
def ours(folder: Path, program: Path, count: int, *settings: str) -> Iterator[Ways]:
    """Create our node with this number of services; at sockets if the settings say so."""
    name = f"bench-services-{count}" + ("-sock" if settings else "")
    objects = folder / name
    objects.mkdir(exist_ok=True)
    more = (f"--manifests-dir={objects}", "--enable-node-port=true", *settings)
    known_pods(objects, "a", "b")
    with our_lab(name, *more) as (made, _), contextlib.ExitStack() as stack:
        pods.add(made, "a")
        address = pods.add(made, "b").ipv4
        load = ServiceLoad(count, address, SERVED, NODE_ADDRESS)
        (objects / "services.yaml").write_text(manifests(load))
        client, serving = (stack.enter_context(made.open_pod(each)) for each in "ab")
        outside = stack.enter_context(made.open_outside())
        stack.enter_context(server(program, Pair(client, serving, address), BACKENDS))
        stack.enter_context(server(program, Pair(client, outside, OUTSIDE_ADDRESS)))
        group = unified() / f"hive-lab-{name}" if settings else None
        ways = Ways(
            Way(client, load.asked, PORT, group),
            Way(client, address, SERVED),
            Way(outside, NODE_ADDRESS, NODE_PORT),
            Way(client, OUTSIDE_ADDRESS, SERVED),
        )
        for way in ways:
            eventually(partial(answers, program, way), within=120)
        yield ways


@contextlib.contextmanager
def theirs(
    tool_of: tuple[str, ...], rules: Callable[[ServiceLoad], str], program: Path, count: int
) -> Iterator[Ways]:
    """Create routed pods on a node with kube-proxy's rules."""
    prefix = f"bench-{tool_of[0].replace('-restore', '')}-{count}"
    node, outside = f"{prefix}-node", f"{prefix}-out"
    with peers.routed(prefix) as pair, peers.namespaces(outside), contextlib.ExitStack() as stack:
        ip("link", "add", "uplink", "type", "veth", "peer", "name", "eth0", "netns", outside, netns=node)
        for where, link, address in ((node, "uplink", PEER_NODE), (outside, "eth0", PEER_OUTSIDE)):
            ip("addr", "add", f"{address}/24", "dev", link, netns=where)
            ip("link", "set", link, "up", netns=where)
        load = ServiceLoad(count, pair.address, SERVED, PEER_NODE)
        text = rules(load)
        if tool_of[0] == "nft":
            text += MASQUERADE
        subprocess.run(
            ["ip", "netns", "exec", node, *tool_of], input=text, text=True, check=True, timeout=600
        )
        if tool_of[0] != "nft":
            inside(
                node, tool_of[0].removesuffix("-restore"), "-t", "nat", "-A", "POSTROUTING",
                "-s", "10.201.0.0/24", "-o", "uplink", "-j", "MASQUERADE",
            )  # fmt: skip
        away = stack.enter_context(Namespaces.open(f"/run/netns/{outside}"))
        stack.enter_context(server(program, pair, BACKENDS))
        stack.enter_context(server(program, Pair(pair.client, away, PEER_OUTSIDE)))
        ways = Ways(
            Way(pair.client, load.asked, PORT),
            Way(pair.client, pair.address, SERVED),
            Way(away, PEER_NODE, NODE_PORT),
            Way(pair.client, PEER_OUTSIDE, SERVED),
        )
        for way in ways:
            eventually(partial(answers, program, way))
        yield ways


MASQUERADE = """
table ip leaving {
    chain out {
        type nat hook postrouting priority 101;
        oifname "uplink" ip saddr 10.201.0.0/24 masquerade
    }
}
"""


def answers(program: Path, way: Way) -> bool:
    """Return whether the address answers."""
    try:
        median(program, "rr", way, 1)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def median(program: Path, kind: str, way: Way, count: int) -> float:
    """Return the median of a round trip (rr), a call of connect, or a connection with a round trip (crr), in
    µs.
    """

    def enter() -> None:
        if way.cgroup is not None:
            (way.cgroup / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        way.client.enter()

    command = [str(program), kind, "1", way.address, str(way.port), str(count)]
    done = subprocess.run(
        command,
        preexec_fn=enter,
        check=True,
        capture_output=True,
        text=True,
        timeout=5 if count == 1 else 120,
    )
    return int(done.stdout.split()[1]) / 1000


NFT, LEGACY, BY_NFT = "nft", "iptables-legacy", "iptables-nft"
RESTORE = {
    NFT: (("nft", "-f", "-"), nft_rules),
    LEGACY: (("iptables-legacy-restore",), iptables_rules),
    BY_NFT: (("iptables-nft-restore",), iptables_rules),
}


def measure(folder: Path, rounds: int) -> list[Row]:
    """Measure connections and round trips for each number of services; node ports, masquerading."""
    program = tool("traffic", folder)
    rows: list[Row] = []
    for count in COUNTS:
        rows += _with(folder, program, count, min(rounds, 5))
    return rows


def _with(folder: Path, program: Path, count: int, rounds: int) -> list[Row]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(ours(folder, program, count, "--bpf-lb-sock=true"))
        packets = stack.enter_context(ours(folder, program, count))
        others = {
            name: stack.enter_context(theirs(*how, program, count))
            for name, how in RESTORE.items()
            if name != BY_NFT or count <= FEWER
        }
        places = {"at sockets": sockets, "by packets": packets, **others}
        for _ in range(rounds):
            for name, ways in places.items():
                for kind, times in (("connect", CONNECTIONS), ("rr", ROUND_TRIPS)):
                    found[kind, name].append(median(program, kind, ways.service, times))
                found["direct", name].append(median(program, "connect", ways.direct, CONNECTIONS))
                found["node port", name].append(median(program, "rr", ways.node_port, ROUND_TRIPS))
                found["node port crr", name].append(median(program, "crr", ways.node_port, CONNECTIONS))
                found["out", name].append(median(program, "crr", ways.out, CONNECTIONS))
    samples = {key: Sample(tuple(values)) for key, values in found.items()}
    rows = []
    for way in ("at sockets", "by packets"):
        aims = {NFT: 1.3, LEGACY: 1.7} if count == max(COUNTS) and way == "at sockets" else {}
        mine = samples["connect", way]
        what = f"{count:,} services, {way}"
        rows.append(
            Row(f"{what}: connection", "µs", mine, "no service", samples["direct", way], None, faster=False)
        )
        for name in others:
            rows.append(
                Row(f"{what}: connection", "µs", mine, name, samples["connect", name], aims.get(name))
            )
            rows.append(Row(f"{what}: round trip", "µs", samples["rr", way], name, samples["rr", name], None))
    what = f"{count:,} services"
    for name in others:
        for kind, title in (
            ("node port", "round trip by a node port"),
            ("node port crr", "connection by a node port"),
            ("out", "masqueraded connection"),
        ):
            rows.append(
                Row(f"{what}: {title}", "µs", samples[kind, "by packets"], name, samples[kind, name], None)
            )
    return rows
