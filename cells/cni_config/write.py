"""The CNI configuration file: its text, and keeping it written.

Needs: CniConfigSettings, AgentConfig, DeleteQueue, CniServer, Api.   Gives: CniConfig, conflist, write_file.
Source: Cilium 1.17, CNI configuration of mode "none"; mode 0600 as of 1.18.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from anyio import to_thread

from cells.api import Api
from cells.cni_config.settings import CniConfigSettings
from cells.cni_server import CniServer, DeleteQueue
from cells.config import AgentConfig
from lifecycle import Health, Hook, Jobs, Lifecycle, Logger

DEFAULT_SOCKET: Final = Path("/var/run/cilium/cni.sock")
MODE: Final = 0o600


def conflist(log_file: str, socket: Path, *, debug: bool = False) -> str:
    """Text of the file: the plugin alone, and the socket where it is not what the plugin expects."""
    plugin: dict[str, object] = {"type": "cilium-cni", "enable-debug": debug, "log-file": log_file}
    if socket != DEFAULT_SOCKET:
        plugin["agent-socket"] = str(socket)
    return json.dumps({"cniVersion": "0.3.1", "name": "cilium", "plugins": [plugin]}, indent=2) + "\n"


def write_file(path: Path, text: str) -> bool:
    """Make the file hold ``text``, at once or not at all; False when it did already and was not touched.

    Makes missing directories. Raises OSError.
    """
    wanted = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.read_bytes() == wanted:
            return False
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{path.name}.new")  # no name a runtime would read
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  # an open descriptor, with its mode
            os.fchmod(descriptor, MODE)
            file.write(wanted)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return True


class CniConfig:
    """Announces the node: its hook lets plugins at the delete queue again, its job writes the file.

    It depends on both servers, so it starts once they accept. A file that cannot be written degrades the
    module's health and is tried again. It stays when the agent stops.
    """

    def __init__(
        self,
        settings: CniConfigSettings,
        config: AgentConfig,
        queue: DeleteQueue,
        server: CniServer,
        api: Api,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        del server, api  # they serve by now: that is why this waits for them
        self._settings = settings
        self._config = config
        self._queue = queue
        self._health = health
        self._log = log
        lifecycle.append(Hook("open the delete queue", self._announce))
        if settings.write_cni_conf_when_ready:
            jobs.one_shot("write", self.write)

    async def _announce(self) -> None:
        self._queue.release()
        if not self._settings.write_cni_conf_when_ready:
            self._health.ok("CNI configuration management disabled")

    async def write(self) -> None:
        """Write the file unless it is right already; raises OSError, having told the module's health."""
        path = Path(self._settings.write_cni_conf_when_ready)
        text = conflist(self._settings.cni_log_file, self._config.cni_socket, debug=self._config.debug)
        try:
            written = await to_thread.run_sync(write_file, path, text)
        except OSError as error:
            self._health.degraded(f"failed to write CNI configuration file {path}: {error}", error)
            raise
        self._health.ok(f"successfully wrote CNI configuration file to {path}")
        if written:
            self._log.info("CNI configuration file written", path=str(path))
