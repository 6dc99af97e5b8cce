"""A BGP speaker: the cost of announcing, the delay of a change to its peer, and the death of a speaker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from ipaddress import ip_network
from pathlib import Path

import anyio

from cells.bgp import gobgp_messages as api
from cells.bgp.gobgpd import GobgpError, connected
from cells.bgp.speaker_processes import end_speakers
from cells.bgp.speaker_state import IPV4_UNICAST, AnnouncedPath, PeerRestart, RoutePolicy, SpeakerName
from hive.lab.namespaces import new_node
from tests.bench.stats import Figure, Sample
from tests.support.bgp import FRR, INSTANCE, NODE, Wanted, agent, cable, gobgpd_pids, peer, policy

SERVICES, RANGES, CHANGES = 1000, 256, 50
TICK = 1 / os.sysconf("SC_CLK_TCK")


def service(number: int) -> tuple[RoutePolicy, AnnouncedPath]:
    """Return a service's address, with the policy that a controller derives from it."""
    address = f"10.96.{number >> 8}.{number & 255}/32"
    return policy(f"tor-ipv4-Service-{number}", FRR, address), AnnouncedPath(INSTANCE, ip_network(address))


def processor(pid: int) -> float:
    """Return the seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def memory(pid: int) -> float:
    """Return the MiB of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def until(condition: Callable[[], Awaitable[bool]]) -> float:
    """Return the seconds until the condition is true."""
    began = time.perf_counter()
    with anyio.fail_after(60):
        while True:
            if await condition():
                return time.perf_counter() - began
            await anyio.sleep(0.005)


async def begin_router(socket: Path) -> None:
    """Start a gobgpd that waits for connections, keeps the routes of broken sessions, announces nothing."""

    async def answers() -> bool:
        try:
            async with connected(socket):
                return True
        except GobgpError:
            return False

    await until(answers)
    async with connected(socket) as gobgp:
        await gobgp.start(api.Global(asn=65101, router_id=FRR, listen_port=179))
        await gobgp.add_peer(
            api.ApiPeer(
                conf=api.PeerConf(neighbor_address=NODE, peer_asn=65001),
                transport=api.ApiTransport(passive_mode=True),
                graceful_restart=api.GracefulRestart(
                    enabled=True, restart_time=120, notification_enabled=True
                ),
                afi_safis=[
                    api.PeerFamily(
                        config=api.FamilyConfig(family=api.AddressFamily(afi=1, safi=1), enabled=True),
                        mp_graceful_restart=api.FamilyRestart(config=api.Enabled(enabled=True)),
                    )
                ],
            )
        )


async def one_round(folder: Path, far: Path) -> list[float]:
    """Return figures in the order of FIGURES."""
    wanted = Wanted()
    tor = peer("tor", FRR, 65101, families=(IPV4_UNICAST,), graceful_restart=PeerRestart(enabled=True))
    wanted.put(tor)
    await begin_router(far)
    async with agent(wanted, folder) as speakers, connected(far) as router:

        async def session() -> api.ApiPeer:
            (found,) = await router.peers()
            return found

        async def established() -> bool:
            found = (await session()).state
            return found is not None and found.session_state == api.SessionState.ESTABLISHED

        async def received(count: int) -> bool:
            state = (await session()).afi_safis[0].state
            return await established() and state is not None and state.received == count

        dialled = await until(established)
        (pid,) = gobgpd_pids(folder / "bgp")
        pods = [f"10.{16 + (number >> 8)}.{number & 255}.0/24" for number in range(RANGES)]
        rows = [row for number in range(SERVICES) for row in service(number)]
        ours, its = time.process_time(), processor(pid)
        wanted.put(policy("tor-ipv4-PodCIDR", FRR, *pods), *rows)
        wanted.announce(*pods)
        announced = await until(partial(received, SERVICES + RANGES))
        ours, its = time.process_time() - ours, processor(pid) - its
        changes = await _changes(wanted, far)
        size = memory(pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: _not(established))
        back = await until(partial(received, SERVICES + RANGES + CHANGES))
        await speakers.reconciler.wait_realised(SpeakerName(INSTANCE))
        return [dialled, announced, ours, its, *changes, size, back]


async def _changes(wanted: Wanted, far: Path) -> tuple[float, float]:
    """Return median and maximum ms from a row to its route at the router."""
    took = []
    async with connected(far) as watching, aclosing(watching.events(routes=True)) as events:
        for number in range(CHANGES):
            began: list[float] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_change, wanted, SERVICES + number, began)
                await anext(events)
            took.append((time.perf_counter() - began[0]) * 1000)
    took.sort()
    return took[len(took) // 2], took[-1]


async def _change(wanted: Wanted, number: int, began: list[float]) -> None:
    await anyio.sleep(0.05)  # until the router's watch is open, or the last change is over
    began.append(time.perf_counter())
    wanted.put(*service(number))


async def _not(condition: Callable[[], Awaitable[bool]]) -> bool:
    return not await condition()


def in_node(folder: Path) -> list[float]:
    """Run one round in a node of its own."""
    with cable() as far:
        socket = folder / "router.sock"
        command = ["gobgpd", "--api-hosts", f"unix://{socket}", "--pprof-disable", "-p"]
        with (folder / "router.log").open("wb") as log:
            router = far.popen(command, stdout=log, stderr=log)
        try:
            return anyio.run(one_round, folder, socket)
        finally:
            end_speakers(folder)
            router.kill()
            router.wait()


FIGURES = (
    ("start to session", "s"),
    (f"{SERVICES:,} services and {RANGES} ranges, to the peer", "s"),
    (f"{SERVICES:,} services and {RANGES} ranges, the agent's processor", "s"),
    (f"{SERVICES:,} services and {RANGES} ranges, gobgpd's processor", "s"),
    ("one service more, to the peer: median", "ms"),
    ("one service more, to the peer: longest", "ms"),
    ("gobgpd: memory", "MiB"),
    ("kill -9 of gobgpd to all routes announced again", "s"),
)


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return seconds, milliseconds, MiB."""
    found = []
    for number in range(rounds):
        place = folder / f"bgp{number}"
        place.mkdir()
        with new_node() as node:
            found.append(node.run(in_node, place))
    return [
        Figure(f"BGP: {what}", unit, Sample(values))
        for (what, unit), values in zip(FIGURES, zip(*found, strict=True), strict=True)
    ]
