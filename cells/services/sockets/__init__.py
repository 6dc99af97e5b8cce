"""Services at the socket: who connects to one talks to a backend from the start.

Edge: programs attached to the root of the control groups, for every process of the node and its pods; they
      read the maps of the services.
Why:  a connection is translated once, before there is a packet, and costs what a direct one costs. The links
      are pinned: programs serve on while no agent runs, and another build replaces them in place.

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


# Keeps the programs of socket load balancing attached, or takes them off.

INTERVAL: Final = seconds(30)
OLDEST: Final = (5, 18)
"""bpf_set_retval: gives connect() to a service without backends its error."""


class SocketLB:
    """The hook attaches the programs, and every half a minute what is missing is put back.

    What cannot be attached does not keep the node from starting: health is degraded, and it is tried again.
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
        """Of the node's own network namespace alone."""
        self.found = 0
        """Programs found detached or replaced, so far."""
        self._settings = settings
        self._programs = programs
        self._hooks = hooks
        self._health = health.child("programs")
        self._log = log
        self._one = CapacityLimiter(1)
        self._attached = False
        lifecycle.append(Hook("attach to sockets", self._start, self._stop))
        if self.enabled:
            self._timer = jobs.timer("compare socket programs", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Look at what is attached, and attach what is not as it should be. Raises HiveError, OSError."""
        if not self._attached:
            await self._attach()
            return
        self._hooks.configure(self._config())
        if missing := await to_thread.run_sync(self._hooks.missing, limiter=self._one):
            self.found += len(missing)
            self._health.degraded(f"detached: {', '.join(missing)}")
            await self._attach()
            text = "socket programs were detached by others, attached again"
            self._log.warning(text, programs=", ".join(missing))

    async def _start(self) -> None:
        if not self.enabled:
            if taken := await to_thread.run_sync(self._hooks.take_off, limiter=self._one):
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
                self._hooks.attach, asked or DEFAULT_CGROUP_ROOT, limiter=self._one
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
    """Raise UsageError on a kernel without bpf_set_retval for programs at sockets."""
    version = version_of(release)
    if version is not None and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(
            f"bpf-lb-sock=true: Linux {release} is too old, it takes {oldest}; leave it out, and packets to"
            " services are translated one by one"
        )


# Ends sockets after their backend has stopped serving: applications connect again, and get another one.
#
# Controller: the table ``services`` and what the programs remember of sockets in, ended sockets out.
# Why:        a UDP socket connected to a backend would send there for ever: no packet reports the end to
#             the application.
#
# What is looked for is not what has just changed, but every socket that was sent to a backend by a service
# that has it no more: a restart in between misses none. A socket is ended only if it is connected to that
# backend, and is, by the kernel's number of it, the very one that the service sent there: those that are not
# connected, that were connected to the pod directly, or that another service sent there, stay.

TCP, UDP, ANY = 6, 17, 0


class SocketTermination:
    """A job, if services are served at sockets."""

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
        """Sockets ended so far."""
        self._served = served
        self._kernel = kernel
        self._log = log
        self._protocols = (UDP, TCP) if settings.bpf_lb_sock_terminate_all_protos else (UDP,)
        self._pods = settings.bpf_lb_sock_terminate_pod_connections and not sockets.host_only
        self._looked_for: set[ReverseSkKey] = set()
        self._due = asyncio.Event()
        if sockets.enabled:
            jobs.one_shot("watch for removed backends", self._watch)
            jobs.observe("close sockets of removed backends", self._looks, self._look)

    async def _watch(self) -> None:
        """Check sockets: at first, for what was removed while no agent ran, and after each removal.

        It never waits for a look. Changes of a row that wait are one change: a backend that was added and
        removed meanwhile would not be in it.
        """
        changes = self._served.changes()
        await self._served.wait_initialized()
        changes.take()
        self._due.set()
        async for batch in changes:
            if any(lost_backends(each, self._protocols) for each in batch):
                self._due.set()

    async def _looks(self) -> AsyncIterator[None]:
        """An item for each look that is due."""
        while True:
            await self._due.wait()
            self._due.clear()
            yield

    async def _look(self, _: None) -> None:
        remembered = await to_thread.run_sync(lambda: list(self._kernel.remembered()))
        frontends = {each.id: each for each in self._served.all()}  # no older than what is remembered
        stale = {key for key, asked in remembered if not still_serves(frontends, key, asked)}
        fresh = stale - self._looked_for
        if fresh:
            ended = await to_thread.run_sync(
                partial(self._kernel.end, fresh, self._protocols, pods=self._pods)
            )
            self.ended += ended
            if ended:
                self._log.info("closed sockets that were connected to removed backends", sockets=ended)
        self._looked_for = stale  # only now: after an error they are looked for again


def lost_backends(change: Change[FrontendKey, ServedFrontend], protocols: Iterable[int]) -> bool:
    """Whether a frontend of these protocols has a backend no more."""
    old, new = change.old, change.row
    if old is None or old.key.address.protocol not in {ANY, *protocols}:
        return False
    left = {each.address for each in new.frontend.backends} if new is not None else set()
    return any(each.address not in left for each in old.frontend.backends)


def still_serves(frontends: Mapping[int, ServedFrontend], sent: ReverseSkKey, asked: ReverseSk) -> bool:
    """Whether the service that a socket asked for has the backend it was sent to."""
    served = frontends.get(asked.rev_nat_index)
    if served is None:
        return False
    address = served.key.address
    if address.port != asked.port or (int(address.ip) and address.ip != asked.ip):
        return False  # the number is another service's by now
    return any(
        (each.address.ip, each.address.port) == (sent.ip, sent.port) for each in served.frontend.backends
    )


def socket_metrics(sockets: SocketLB, termination: SocketTermination) -> Member[Collector]:
    """Programs repaired and sockets ended, as metrics."""

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
    provide(SocketLB, KernelSocketHooks.provided, SocketTermination, KernelSockets.provided, socket_metrics),
    invoke(SocketLB, SocketTermination),
)
