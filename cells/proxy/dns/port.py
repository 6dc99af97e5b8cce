"""The port of the DNS proxy, stable across restarts, and the local route of packets marked for a proxy.

Source: Cilium 1.17, proxy_ports_state.json.
"""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.config import AgentConfig, ChainingMode
from cells.netlink.connection import LOAD_BYTE, Field, message_filter, notifications, of_types
from cells.netlink.network import FwmarkRule, add_local_delivery, remove_local_delivery
from cells.policy.control import L7Proxy
from cells.proxy.dns.settings import DNSPortSettings, DNSProxySettings
from cells.proxy.dns.sockets import tcp_listener, udp_listener
from lifecycle import Hook, Jobs, Lifecycle, Logger, Member, NotStartedError, Table

RANGE: Final = range(10000, 20000)
"""Candidate ports, below the kernel's ephemeral ports."""
NAME: Final = "cilium-dns-egress"
FILE: Final = "proxy_ports_state.json"


class _Port(msgspec.Struct):
    type: str
    ingress: bool
    port: int


class ProxyPort:
    """The DNS proxy's port: a start hook chooses it, and it stays the same across restarts."""

    def __init__(
        self, settings: DNSPortSettings, agent: AgentConfig, lifecycle: Lifecycle, log: Logger
    ) -> None:
        self._wanted = settings.tofqdns_proxy_port
        self._agent = agent
        self._log = log
        self._port = 0
        lifecycle.append(Hook("choose the DNS proxy's port", self._choose))

    @property
    def port(self) -> int:
        """The port on the loopback address of each family. Raises NotStartedError."""
        if not self._port:
            raise NotStartedError("the DNS proxy's port was asked for before its hook ran: depend on it")
        return self._port

    @property
    def families(self) -> list[socket.AddressFamily]:
        """The enabled address families of pods."""
        found = [(self._agent.ipv4, socket.AF_INET), (self._agent.ipv6, socket.AF_INET6)]
        return [family for enabled, family in found if enabled]

    async def _choose(self) -> None:
        path = self._agent.state_dir / FILE
        saved = _saved_ports(path)
        previous = saved[NAME].port if NAME in saved else 0
        # A known port is not probed by binding it: the datapath would deliver queries of pods to that socket.
        self._port = self._wanted or previous or self._free()
        if previous != self._port:
            saved[NAME] = _Port("dns", ingress=False, port=self._port)
            try:
                temporary = path.with_suffix(".tmp")
                temporary.write_bytes(msgspec.json.encode(saved))
                temporary.rename(path)
            except OSError as error:
                self._log.warning("the DNS proxy's port is not saved for the next agent", error=str(error))

    def _free(self) -> int:
        choices = random.sample(RANGE, 50)
        return next((port for port in choices if self._is_free(port)), choices[0])

    def _is_free(self, port: int) -> bool:
        try:
            for family in self.families:
                for listener in (udp_listener, tcp_listener):
                    listener(family, port).close()
        except OSError as error:
            self._log.info("port of the DNS proxy is taken", port=port, error=str(error))
            return False
        return True


def _saved_ports(path: Path) -> dict[str, _Port]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Port])
    except (OSError, ValueError):
        return {}


# The routing rule and route by which the kernel delivers packets with a proxy's mark locally.
#
# Reconciler: a rule and a route for each family, restored when others remove them.
# Why:        the datapath assigns the socket, but without the local route the kernel forwards a packet to
#             another host's address before it considers the socket.
# Source:     Cilium 1.17, table 2004 and the rule with priority 9; ip-rule(8), ip-route(8) type local.

MARKED: Final = FwmarkRule(mark=0x0200, mask=0x0F00, table=2004, priority=9)
"""The datapath sets this mark; its upper half holds the proxy's port."""

_RTMGRP: Final = 0x40 | 0x400 | 0x80 | 0x40000  # RTMGRP_IPV4_ROUTE, IPV4_RULE, IPV6_ROUTE; RTNLGRP_IPV6_RULE
_RTM_DELROUTE, _RTM_DELRULE = 25, 33
_TABLE_AT, _LARGE_TABLE = 20, 252
_REMOVED: Final = message_filter(
    (of_types(_RTM_DELRULE),),
    (of_types(_RTM_DELROUTE), Field(LOAD_BYTE, _TABLE_AT, (_LARGE_TABLE,))),
)
"""Matches the deletion of a rule, or of a route in a table above 255."""


class ProxyRoutes:
    """Reconciles the rule and the route of local delivery; installed() waits until they exist."""

    port: ProxyPort
    """The DNS proxy's."""
    enabled: bool
    """Whether the proxy runs; if not, rule and route of an earlier agent are removed."""

    def __init__(self, port: ProxyPort, l7: L7Proxy, *, jobs: Jobs) -> None:
        self.port = port
        """The DNS proxy's port."""
        self.enabled = l7.enabled
        """Whether the proxy runs; otherwise the rule and route of a previous agent are removed."""
        self._installed = anyio.Event()
        if self.enabled:
            jobs.observe("keep routes", self._deletions, self._reconcile)
        else:
            jobs.one_shot("remove routes", self._remove)

    async def installed(self) -> None:
        """Wait until rules and routes exist."""
        await self._installed.wait()

    async def _deletions(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP, _REMOVED):
            yield hint

    async def _reconcile(self, _: None) -> None:
        """Install rules and routes. Raises OSError."""
        await to_thread.run_sync(add_local_delivery, MARKED, self.port.families)
        self._installed.set()

    async def _remove(self) -> None:
        await to_thread.run_sync(remove_local_delivery, MARKED, (socket.AF_INET, socket.AF_INET6))


# Proxies that send with pods' addresses; devices' programs deliver the answers to them.


class TransparentProxy(msgspec.Struct, frozen=True):
    """A row of the table ``transparent-proxies``: a proxy that sends with pods' addresses."""

    name: str


def transparent_proxies() -> Table[str, TransparentProxy]:
    """Create the table ``transparent-proxies``, by name."""
    return Table("transparent-proxies", key=lambda row: row.name)


class QuerySource:
    """The source address of the proxy's queries: the pod's or the node's."""

    def __init__(
        self,
        settings: DNSProxySettings,
        modes: list[Member[ChainingMode]],
        proxies: Table[str, TransparentProxy],
        l7: L7Proxy,
    ) -> None:
        wanted = settings.dnsproxy_enable_transparent_mode
        transparent = all(mode.own_links for mode in modes) if wanted is None else wanted
        self.transparent = transparent and l7.enabled
        """Whether queries have the pod's address and port as source."""
        self._proxies = proxies

    def announce(self) -> None:
        """Make devices' programs deliver answers to the proxy; called before the first query is sent."""
        if self.transparent and not len(self._proxies):
            self._proxies.put(TransparentProxy(NAME))
