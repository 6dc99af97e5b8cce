"""Keeps the programs of socket load balancing attached, or takes them off.

Needs: SocketLBSettings, ServiceSettings, DatapathSettings, SocketHooks, Jobs.   Gives: SocketLB.
"""

from __future__ import annotations

import os
from typing import Final

from anyio import CapacityLimiter, to_thread

from cells.config import version_of
from cells.datapath import DatapathSettings, LoadError
from cells.maps import SOCK_BIND_PROTECTION, SOCK_HOST_ONLY, SOCK_REJECTS, SOCK_TRUSTS_EXTERNAL_IP, SockConfig
from cells.node.netlink import own_netns_cookie
from cells.services.settings import ServiceSettings
from cells.services.sockets.kernel import SocketHooks
from cells.services.sockets.settings import DEFAULT_CGROUP_ROOT, SocketLBSettings
from lifecycle import Health, HiveError, Hook, Jobs, Lifecycle, Logger, UsageError, seconds

INTERVAL: Final = seconds(30)
OLDEST: Final = (5, 18)
"""bpf_set_retval, by which who connects to a service without backends is told so."""


class SocketLB:
    """The hook attaches the programs, and every half a minute what is missing is put back.

    What cannot be attached does not keep the node from starting: health is degraded, and it is tried again.
    """

    def __init__(
        self,
        settings: SocketLBSettings,
        services: ServiceSettings,
        datapath: DatapathSettings,
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
        """Programs that somebody took off or replaced, so far."""
        self._settings = settings
        self._datapath = datapath
        self._hooks = hooks
        self._health = health.child("programs")
        self._log = log
        self._one = CapacityLimiter(1)
        self._attached = False
        lifecycle.append(Hook("attach to sockets", self._start, self._stop))
        if self.enabled:
            self._timer = jobs.timer("compare programs at sockets", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Look at what is attached, and attach what is not as it should be. Raises HiveError, OSError."""
        if not self._attached:
            await self._attach()
            return
        self._hooks.configure(self._config())
        if missing := await to_thread.run_sync(self._hooks.missing, limiter=self._one):
            self.found += len(missing)
            self._health.degraded(f"taken off: {', '.join(missing)}")
            await self._attach()
            text = "programs at sockets were taken off, attached again"
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
            f"only processes below {root.path} reach services at their sockets: it is not the first control"
            " group; run hive mount-cgroup in the node's own namespaces"
        )
        self._log.warning(text)
        self._health.degraded(text)

    def _config(self) -> SockConfig:
        settings = self._settings
        flags = (
            SOCK_HOST_ONLY * settings.bpf_lb_sock_hostns_only
            | SOCK_BIND_PROTECTION * settings.node_port_bind_protection
            | SOCK_TRUSTS_EXTERNAL_IP * self._datapath.disable_external_ip_mitigation
            | SOCK_REJECTS * (self._datapath.service_no_backend_response == "reject")
        )
        first, last = self._datapath.node_port_range
        return SockConfig(own_netns_cookie(), (first, last), flags)


def check_kernel(release: str) -> None:
    """Raise UsageError on a kernel whose programs at sockets cannot say why they refuse."""
    version = version_of(release)
    if version is not None and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(
            f"bpf-lb-sock=true: Linux {release} is too old, it takes {oldest}; leave it out, and packets to"
            " services are translated one by one"
        )
