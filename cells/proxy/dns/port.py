"""The port of the DNS proxy: chosen once, and kept.

For:    RulePolicy, whose map entries name it, and DNSProxy.   Needs: AgentConfig, DNSProxySettings.
Gives:  ProxyPort.
Source: Cilium 1.17, proxy_ports_state.json.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

import msgspec

from cells.config import AgentConfig
from cells.proxy.dns.settings import DNSProxySettings
from cells.proxy.dns.sockets import tcp_listener, udp_listener
from lifecycle import Hook, Lifecycle, Logger, NotStartedError

RANGE: Final = range(10000, 20000)
"""Where a port is looked for: below those that the kernel gives to sockets."""
NAME: Final = "cilium-dns-egress"
FILE: Final = "proxy_ports_state.json"


class _Port(msgspec.Struct):
    type: str
    ingress: bool
    port: int


class ProxyPort:
    """There once its hook has run."""

    def __init__(
        self, settings: DNSProxySettings, agent: AgentConfig, lifecycle: Lifecycle, log: Logger
    ) -> None:
        self._wanted = settings.tofqdns_proxy_port
        self._agent = agent
        self._log = log
        self._port = 0
        lifecycle.append(Hook("choose the DNS proxy's port", self._choose))

    @property
    def port(self) -> int:
        """Of the loopback address of each family. Raises NotStartedError."""
        if not self._port:
            raise NotStartedError("the DNS proxy's port was asked for before its hook ran: depend on it")
        return self._port

    @property
    def families(self) -> list[socket.AddressFamily]:
        """Those that pods have."""
        found = [(self._agent.ipv4, socket.AF_INET), (self._agent.ipv6, socket.AF_INET6)]
        return [family for enabled, family in found if enabled]

    async def _choose(self) -> None:
        path = self._agent.state_dir / FILE
        kept = _kept(path)
        former = kept[NAME].port if NAME in kept else 0
        # Not tried: for a moment a socket there would be sent what pods ask.
        self._port = self._wanted or former or self._free()
        if former != self._port:
            kept[NAME] = _Port("dns", ingress=False, port=self._port)
            try:
                temporary = path.with_suffix(".tmp")
                temporary.write_bytes(msgspec.json.encode(kept))
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


def _kept(path: Path) -> dict[str, _Port]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Port])
    except (OSError, msgspec.MsgspecError):
        return {}
