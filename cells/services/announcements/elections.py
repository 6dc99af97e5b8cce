"""Leader election, by a Lease per service, for the node that answers ARP for the service's addresses.

Candidates come in from the table ``l2-candidates``; the table ``l2-leases`` has the holders. Also the
responder's map and gratuitous ARP.

Source: Cilium 1.17: leases ``cilium-l2announce-<namespace>-<name>`` in the agents' namespace, held by node
names; client-go's leaderelection.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from ipaddress import IPv4Address
from typing import Final, Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from cells.base.labels import AgentNamespace
from cells.config import AgentConfig
from cells.config.shared import AnnouncementSettings
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.kind import Key
from cells.maps.bpf import BpfError
from cells.maps.map import NOEXIST
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import AGENT_LIVENESS, L2ResponderKey
from cells.netlink.rows import parse_mac
from cells.services.announcements.policies import L2Candidate
from lifecycle import Change, Jobs, Logger, ReadTable, Table, Tables, Timer, minutes

# The maps of the answering programs, and gratuitous ARP.
#
# Source: RFC 826; RFC 5227 section 2.3, announcing an address.

BROADCAST: Final = b"\xff" * 6
_NO_RESPONSES: Final = bytes(8)
_INDEX: Final = struct.pack("<I", AGENT_LIVENESS)
_TIME: Final = struct.Struct("<Q")

Frame = tuple[str, IPv4Address, str]
"""Device, address, MAC."""


class ResponderKernel(Protocol):
    """The maps of the L2 responder, and gratuitous ARP. Methods raise OSError."""

    def held(self) -> list[L2ResponderKey]:
        """Return the keys in the map."""
        ...

    def add(self, key: L2ResponderKey) -> bool:
        """Add an address; return whether it is new. An existing entry retains its counter."""
        ...

    def delete(self, key: L2ResponderKey) -> None:
        """Delete an address."""
        ...

    def alive(self, moment: int) -> None:
        """Write the agent's heartbeat, in nanoseconds of CLOCK_MONOTONIC."""
        ...

    def announce(self, frames: Mapping[L2ResponderKey, Frame]) -> dict[L2ResponderKey, OSError]:
        """Send gratuitous ARP; return the errors. Called in a worker thread."""
        ...


class KernelResponder:
    """The responder's maps in the kernel, and packet sockets."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, settings: AnnouncementSettings) -> ResponderKernel:
        """Select the responder's map, if announcements are enabled."""
        if settings.enable_l2_announcements:
            maps.use("l2_responder4")
        return KernelResponder(maps)

    def held(self) -> list[L2ResponderKey]:
        """Return the keys in the map."""
        return [L2ResponderKey.unpack(raw) for raw, _ in self._maps.l2_responder4.items()]

    def add(self, key: L2ResponderKey) -> bool:
        """Add an address; return whether it is new."""
        found = self._maps.l2_responder4
        try:
            found.update(key.pack(), _NO_RESPONSES, NOEXIST)
        except BpfError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def delete(self, key: L2ResponderKey) -> None:
        """Delete an address."""
        self._maps.l2_responder4.delete(key.pack())

    def alive(self, moment: int) -> None:
        """Write the agent's heartbeat."""
        self._maps.runtime_config.update(_INDEX, _TIME.pack(moment))

    def announce(self, frames: Mapping[L2ResponderKey, Frame]) -> dict[L2ResponderKey, OSError]:
        """Send gratuitous ARP from one packet socket; closing it waits for RCU."""
        failed: dict[L2ResponderKey, OSError] = {}
        try:
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except OSError as error:  # without CAP_NET_RAW
            return dict.fromkeys(frames, error)
        with closing(opened) as own:
            for key, (device, ip, mac) in frames.items():
                try:
                    own.sendto(announcement(ip, parse_mac(mac)), (device, 0))
                except OSError as error:
                    failed[key] = error
        return failed


def announcement(ip: IPv4Address, mac: bytes) -> bytes:
    """Return a gratuitous ARP request for an address and its MAC."""
    header = BROADCAST + mac + struct.pack(">HHHBBH", 0x0806, 1, 0x0800, 6, 4, 1)
    return header + mac + ip.packed + bytes(6) + ip.packed


PREFIX: Final = "cilium-l2announce-"
COLLECT: Final = minutes(1)


class L2Lease(msgspec.Struct, frozen=True):
    """A row of the table ``l2-leases``: the holder of a service's lease; empty if unknown."""

    service: Key
    lease: str
    holder: str
    held: bool
    """Whether it is this node."""


class Elections:
    """Runs a leader election for every candidate service; the leases are a table.

    The table is initialized once the API server has answered for each initial candidate, or after one lease
    duration; until then, addresses of an earlier agent stay. Only then is the heartbeat written, so that the
    programs never answer for an address that another node may hold.
    """

    def __init__(
        self,
        settings: AnnouncementSettings,
        agent: AgentConfig,
        namespace: AgentNamespace,
        api: KubernetesAPI,
        kernel: ResponderKernel,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._given = settings.given_times
        self._times = settings.lease_times
        self._agent = agent
        self._namespace = namespace.name
        self._api = api
        self._kernel = kernel
        self._log = log
        self._jobs = jobs
        self.leases: Table[tuple[str, str], L2Lease] = Table("l2-leases", key=lambda row: row.service)
        """The holder of each service's lease."""
        self._initializer = self.leases.initializer("holders of leases")
        self._electing: set[Key] = set()
        if settings.enable_l2_announcements:
            tables.add(self.leases)

    def follow(self, candidates: ReadTable[tuple[str, str], L2Candidate]) -> None:
        """Run elections for these candidates from now on."""
        given = self._given
        for name, before, now in zip(given._fields, given, self._times, strict=True):
            if before != now:
                self._log.warning(
                    "L2 announcements: an election cannot have this time: using another",
                    time=name, given=str(before), used=str(now),
                )  # fmt: skip
        alive = self._jobs.timer("write the agent's heartbeat", self._write_heartbeat, self._times.heartbeat)
        self._jobs.one_shot("elections", partial(self._run, candidates, alive))
        self._jobs.timer("collect leases", self.collect, COLLECT, jitter=0.2)

    async def _run(self, candidates: ReadTable[tuple[str, str], L2Candidate], alive: Timer) -> None:
        await candidates.wait_initialized()
        async with anyio.create_task_group() as group:
            changes = candidates.changes()
            first = changes.take()
            group.start_soon(
                self._initialize, [each.row.service for each in first if each.row is not None], alive
            )
            self._start_elections(group, candidates, first)
            async for batch in changes:
                self._start_elections(group, candidates, batch)

    def _start_elections(
        self,
        group: TaskGroup,
        candidates: ReadTable[tuple[str, str], L2Candidate],
        batch: Iterable[Change[tuple[str, str], L2Candidate]],
    ) -> None:
        for change in batch:
            row = change.row
            if row is None or row.service in self._electing:
                continue
            if row.local:
                self._log.warning(
                    "a service with externalTrafficPolicy Local is announced: the node that answers may have"
                    " none of its backends; make it Cluster",
                    service="/".join(row.service),
                )
            group.start_soon(self._elect, candidates, row.service)

    async def _initialize(self, services: Iterable[Key], alive: Timer) -> None:
        """Initialize the table once it has all of these services, or after one lease duration."""
        with anyio.move_on_after(self._times.duration):
            async with anyio.create_task_group() as group:
                for key in services:
                    group.start_soon(self.leases.wait_for, key)
        self._initializer.done()
        alive.trigger()

    async def _elect(self, candidates: ReadTable[tuple[str, str], L2Candidate], key: Key) -> None:
        """Run the election while the service is a candidate."""
        self._electing.add(key)
        try:
            while key in candidates:
                async with anyio.create_task_group() as group:
                    group.start_soon(_until_removed, candidates, key, group.cancel_scope)
                    await self._campaign(candidates, key)
                    group.cancel_scope.cancel()
        finally:
            self._electing.discard(key)
            with self.leases.txn() as rows:
                rows.delete(key)

    async def _campaign(self, candidates: ReadTable[tuple[str, str], L2Candidate], key: Key) -> None:
        """Acquire the lease, and renew it until it is lost."""
        from cells.kubernetes.leases import Election  # needed only with an API server

        name, own, times = lease_name(key), self._agent.node_name, self._times

        def announce(holder: str) -> None:
            with self.leases.txn() as rows:
                rows.put(L2Lease(key, name, holder, holder == own))

        election = Election(
            *(self._api.client, name, self._namespace, own, self._log),
            duration=times.duration,
            deadline=times.deadline,
            retry=times.retry,
            observed=announce,
        )

        async def hold() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                announce("")
                if key in candidates and not election.lost:
                    self._kernel.alive(0)  # the agent stops: another node may answer from now on

        await election.run(hold)

    async def _write_heartbeat(self) -> None:
        await self.leases.wait_initialized()
        self._kernel.alive(time.monotonic_ns())

    async def collect(self) -> None:
        """Delete leases that have neither a holder nor a candidate service."""
        from cells.kubernetes.client.errors import ConflictError
        from cells.kubernetes.leases import LEASES

        client = self._api.client
        found_leases = json.loads(await client.page(LEASES, {}, self._namespace))
        ours = {row.lease for row in self.leases.all()}
        for one in found_leases.get("items") or ():
            name, version = one["metadata"]["name"], one["metadata"]["resourceVersion"]
            held = (one.get("spec") or {}).get("holderIdentity")
            if not held and name.startswith(PREFIX) and name not in ours:
                with suppress(ConflictError):  # another node has just acquired it
                    await client.delete(LEASES, name, self._namespace, version=version)


async def _until_removed(
    candidates: ReadTable[tuple[str, str], L2Candidate], key: Key, scope: anyio.CancelScope
) -> None:
    await candidates.wait_removed(key)
    scope.cancel()


def lease_name(service: Key) -> str:
    """Return the name of the service's Lease."""
    return PREFIX + "-".join(service)
