"""Services at the socket: connect() to a service connects to a backend.

Edge: programs attached to the root control group, for every process of the node and its pods; they read the
      maps of services.
Why:  a connection is translated once, before its first packet, and then costs the same as a direct one. The
      links are pinned: programs work while no agent runs, and another build replaces them in place.

Settings: bpf-lb-sock, bpf-lb-sock-hostns-only, cgroup-root, node-port-bind-protection.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Final

from anyio import CapacityLimiter, to_thread

from cells.base.metrics import Collector, MetricFamily, counter
from cells.config import version_of
from cells.config.shared import ServiceReach
from cells.datapath.libbpf import LoadError
from cells.datapath.settings import ServicePrograms
from cells.maps.records.flows import (
    SOCK_BIND_PROTECTION,
    SOCK_HOST_ONLY,
    SOCK_REJECTS,
    SOCK_TRUSTS_EXTERNAL_IP,
    ReverseSk,
    ReverseSkKey,
    SockConfig,
)
from cells.netlink.namespaces import own_netns_cookie
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from cells.services.sockets.kernel import (
    DEFAULT_CGROUP_ROOT,
    KernelSocketHooks,
    KernelSockets,
    SocketHooks,
    SocketKernel,
    SocketLBSettings,
)
from lifecycle import (
    Change,
    Health,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    Table,
    UsageError,
    config,
    invoke,
    module,
    provide,
    seconds,
)

__all__ = ["SocketHooks", "SocketKernel", "SocketLB", "SocketLBSettings", "SocketTermination", "cell"]


# Keeps the programs of socket load balancing attached, or detaches them.

INTERVAL: Final = seconds(30)
OLDEST: Final = (5, 18)
"""bpf_set_retval: sets the error of connect() to a service without backends."""


class SocketLB:
    """Attaches the programs at start-up, and checks every 30 seconds that they are attached.

    A failure to attach does not stop the agent's start: health is degraded, and attaching is retried.
    """

    def __init__(
        self,
        settings: SocketLBSettings,
        services: ServiceReach,
        programs: ServicePrograms,
        hooks: SocketHooks,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.enabled = settings.serves(services)
        """Whether services are served at sockets."""
        self.host_only = settings.bpf_lb_sock_hostns_only
        """Whether only in the node's own network namespace."""
        self.found = 0
        """Number of programs that were found detached or replaced."""
        self._settings = settings
        self._programs = programs
        self._hooks = hooks
        self._health = health.child("programs")
        self._log = log
        self._limiter = CapacityLimiter(1)
        self._attached = False
        lifecycle.append(Hook("attach to sockets", self._start, self._stop))
        if self.enabled:
            self._timer = jobs.timer("compare socket programs", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Reattach programs that are missing or replaced. Raises HiveError, OSError."""
        if not self._attached:
            await self._attach()
            return
        self._hooks.configure(self._config())
        if missing := await to_thread.run_sync(self._hooks.missing, limiter=self._limiter):
            self.found += len(missing)
            self._health.degraded(f"detached: {', '.join(missing)}")
            await self._attach()
            text = "socket programs were detached by others, attached again"
            self._log.warning(text, programs=", ".join(missing))

    async def _start(self) -> None:
        if not self.enabled:
            if taken := await to_thread.run_sync(self._hooks.detach_all, limiter=self._limiter):
                self._log.info("services are no longer served at sockets", programs=len(taken))
            return
        check_kernel(os.uname().release)
        try:
            await self._attach()
        except (OSError, HiveError) as error:
            if isinstance(error, LoadError) and error.log:
                self._log.error("libbpf", log=error.log)
            self._log.warning("services are not served at sockets yet", error=str(error))
            self._timer.trigger()

    async def _stop(self) -> None:
        self._hooks.close()
        self._attached = False

    async def _attach(self) -> None:
        asked = self._settings.cgroup_root
        try:
            self._hooks.configure(self._config())
            root, changed = await to_thread.run_sync(
                self._hooks.attach, asked or DEFAULT_CGROUP_ROOT, limiter=self._limiter
            )
        except (OSError, HiveError) as error:
            self._health.degraded(str(error))
            raise
        self._attached = True
        if changed:
            self._log.info("services are served at sockets", cgroup=str(root.path), attached=len(changed))
        if root.is_whole or asked is not None:
            self._health.ok(f"attached to {root.path}")
            return
        text = (
            f"only processes below {root.path} reach services at their sockets: it is not the root control"
            " group; run hive mount-cgroup in the node's own namespaces"
        )
        self._log.warning(text)
        self._health.degraded(text)

    def _config(self) -> SockConfig:
        settings = self._settings
        flags = (
            SOCK_HOST_ONLY * settings.bpf_lb_sock_hostns_only
            | SOCK_BIND_PROTECTION * settings.node_port_bind_protection
            | SOCK_TRUSTS_EXTERNAL_IP * self._programs.trusts_external_ips
            | SOCK_REJECTS * self._programs.rejects
        )
        first, last = self._programs.port_range
        return SockConfig(own_netns_cookie(), (first, last), flags)


def check_kernel(release: str) -> None:
    """Raise UsageError if the kernel does not support bpf_set_retval in socket programs."""
    version = version_of(release)
    if version is not None and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(
            f"bpf-lb-sock=true: Linux {release} is too old, it takes {oldest}; leave it out, and packets to"
            " services are translated one by one"
        )


# Closes sockets of removed backends: applications connect again, and reach another backend.
#
# Controller: the table ``services`` and the map of translated sockets in, closed sockets out.
# Why:        a UDP socket would send to a removed backend for ever: no packet reports the removal to the
#             application.
#
# A check examines every socket with a backend that its service no longer has, not only recent changes: so a
# restart misses none. A socket is closed only if it is connected to that backend, and its cookie shows that a
# service sent it there: unconnected sockets, and those that were connected to the pod directly or by another
# service, stay.

TCP, UDP, ANY = 6, 17, 0


class SocketTermination:
    """Destroys sockets connected to removed backends, if services are translated at sockets."""

    def __init__(
        self,
        settings: SocketLBSettings,
        sockets: SocketLB,
        served: Table[FrontendKey, ServedFrontend],
        kernel: SocketKernel,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.ended = 0
        """Number of destroyed sockets."""
        self._served = served
        self._kernel = kernel
        self._log = log
        self._protocols = (UDP, TCP) if settings.bpf_lb_sock_terminate_all_protos else (UDP,)
        self._pods = settings.bpf_lb_sock_terminate_pod_connections and not sockets.host_only
        self._stale_sockets: set[ReverseSkKey] = set()
        self._due = asyncio.Event()
        if sockets.enabled:
            jobs.one_shot("watch for removed backends", self._watch)
            jobs.observe("close sockets of removed backends", self._checks, self._check)

    async def _watch(self) -> None:
        """Schedule a check at start-up, for earlier removals, and after each removal of a backend.

        It must not wait for a check: queued changes of a row are merged, and a backend added and removed
        meanwhile would be missed.
        """
        changes = self._served.changes()
        await self._served.wait_initialized()
        changes.take()
        self._due.set()
        async for batch in changes:
            if any(lost_backends(each, self._protocols) for each in batch):
                self._due.set()

    async def _checks(self) -> AsyncIterator[None]:
        """Yield once for each scheduled check."""
        while True:
            await self._due.wait()
            self._due.clear()
            yield

    async def _check(self, _: None) -> None:
        remembered = await to_thread.run_sync(lambda: list(self._kernel.remembered()))
        frontends = {each.id: each for each in self._served.all()}  # read after the map, so never older
        stale = {key for key, value in remembered if not still_serves(frontends, key, value)}
        fresh = stale - self._stale_sockets
        if fresh:
            ended = await to_thread.run_sync(
                partial(self._kernel.end, fresh, self._protocols, pods=self._pods)
            )
            self.ended += ended
            if ended:
                self._log.info("closed sockets that were connected to removed backends", sockets=ended)
        self._stale_sockets = stale  # after an error, they are checked again


def lost_backends(change: Change[FrontendKey, ServedFrontend], protocols: Iterable[int]) -> bool:
    """Whether a frontend of these protocols lost a backend."""
    old, new = change.old, change.row
    if old is None or old.key.address.protocol not in {ANY, *protocols}:
        return False
    left = {each.address for each in new.frontend.backends} if new is not None else set()
    return any(each.address not in left for each in old.frontend.backends)


def still_serves(frontends: Mapping[int, ServedFrontend], sent: ReverseSkKey, asked: ReverseSk) -> bool:
    """Whether the service of a socket still has the socket's backend."""
    served = frontends.get(asked.rev_nat_index)
    if served is None:
        return False
    address = served.key.address
    if address.port != asked.port or (int(address.ip) and address.ip != asked.ip):
        return False  # another service has the number now
    return any(
        (each.address.ip, each.address.port) == (sent.ip, sent.port) for each in served.frontend.backends
    )


def socket_metrics(sockets: SocketLB, termination: SocketTermination) -> Member[Collector]:
    """Count repaired programs and destroyed sockets."""

    async def collect() -> Iterable[MetricFamily]:
        text = "Socket programs that others detached or replaced."
        ended = "Sockets closed because the backend they were connected to was removed."
        return [
            counter("hive_socket_lb_ended_total", ended, termination.ended),
            counter("hive_socket_lb_faults_total", text, sockets.found),
        ]

    return Collector("socket-lb", collect)


cell = module(
    "socket-lb",
    "Services at the socket",
    config(SocketLBSettings),
    provide(KernelSocketHooks, as_=(SocketHooks,)),
    provide(SocketLB, SocketTermination, KernelSockets.provided, socket_metrics),
    invoke(SocketLB, SocketTermination),
)
