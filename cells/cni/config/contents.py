"""What the CNI configuration file holds.

Needs: CniConfigSettings, the agent's socket, the directory when another network is chained to.
Gives: Contents.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from cells.cni.config.chained import find_target, splice
from cells.cni.config.settings import CniConfigSettings
from cells.cni.config.templates import Plugin, conflist
from lifecycle.settings import read_regular

POD_ANNOTATIONS: Final = {"io.kubernetes.cri.pod-annotations": True}
"""Has containerd and CRI-O tell the plugin of the pod's annotations; one may name its MAC address."""

DEFAULT_SOCKET: Final = Path("/var/run/cilium/cni.sock")


class Contents:
    """The file's contents, by the settings."""

    def __init__(self, settings: CniConfigSettings, socket: Path, *, debug: bool = False) -> None:
        self._settings = settings
        self._socket = socket
        self._debug = debug

    def plugin(self) -> Plugin:
        """Our entry; the socket only where the plugin would not look for it."""
        settings, chained = self._settings, bool(self._settings.chaining_target)
        plugin: Plugin = {"type": "cilium-cni"}
        if chained:
            plugin["chaining-mode"] = settings.chaining_mode
        plugin |= {"enable-debug": self._debug, "log-file": settings.cni_log_file}
        if not chained and settings.chaining_mode != "flannel":  # a chained plugin makes no interface
            plugin |= settings.mac_keys()
            if settings.mac_keys():
                plugin["capabilities"] = POD_ANNOTATIONS
        if self._socket != DEFAULT_SOCKET:
            plugin["agent-socket"] = str(self._socket)
        return plugin

    def read(self, own: Path, skipped: Callable[[str], None]) -> bytes:
        """The bytes for the file ``own``. Raises OSError, NoTargetError.

        ``skipped`` is called for each other configuration that cannot be read.
        """
        settings = self._settings
        if settings.read_cni_conf:
            return read_regular(settings.read_cni_conf)
        if not settings.chaining_target:
            return conflist(settings.chaining_mode, self.plugin()).encode()
        target = find_target(own.parent, settings.chaining_target, own.name, skipped)
        return splice(target, self.plugin()).encode()
