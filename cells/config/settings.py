"""Settings that concern the whole agent.

Needs: nothing.   Gives: AgentSettings.
Names and defaults are Cilium's where it has the option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lifecycle import Settings, refuse

LONGEST_SOCKET: Final = 107
"""Bytes of the path of a unix socket (unix(7))."""
LONGEST_STATE_DIR: Final = LONGEST_SOCKET - len("/cilium.sock")
"""Bytes."""

_CLUSTER_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")


class AgentSettings(Settings, frozen=True):
    """Directories of the agent, address families, the MTU."""

    state_dir: Path = Path("/var/run/cilium")
    """Directory of the sockets, the pidfile, the delete queue and the endpoints' state."""

    socket_path: Path | None = None
    """Path of the API's socket; unset: cilium.sock in the state-dir."""

    bpf_root: Path = Path("/sys/fs/bpf")
    """Where bpffs is mounted; maps are pinned in tc/globals below it."""

    enable_ipv4: bool = True
    """Give pods IPv4 addresses."""

    enable_ipv6: bool = False
    """Give pods IPv6 addresses."""

    cluster_name: str = "default"
    """Name of the cluster, part of every pod's labels."""

    debug: bool = False
    """Log at level debug, here and in the CNI plugin."""

    mtu: int = 0
    """MTU of pod links in bytes; 0 takes the smallest of the node's uplinks."""

    def validate(self) -> None:
        """Refuse what cannot work; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if not (self.enable_ipv4 or self.enable_ipv6):
            yield "enable-ipv4=false and enable-ipv6=false: a pod needs an address; leave one of them true"
        if self.mtu and not 576 <= self.mtu <= 65535:
            yield f"mtu={self.mtu}: expected 0, or 576 to 65535 bytes"
        for name in ("state_dir", "bpf_root"):
            path: Path = getattr(self, name)
            if not path.is_absolute():
                yield f"{name.replace('_', '-')}={path}: expected an absolute path"
        if len(os.fsencode(self.state_dir)) > LONGEST_STATE_DIR:
            yield (
                f"state-dir={self.state_dir}: too long for the sockets in it, expected at most"
                f" {LONGEST_STATE_DIR} bytes"
            )
        if (socket := self.socket_path) is not None and not socket.is_absolute():
            yield f"socket-path={socket}: expected an absolute path"
        if socket is not None and len(os.fsencode(socket)) > LONGEST_SOCKET:
            yield f"socket-path={socket}: too long for a socket, expected at most {LONGEST_SOCKET} bytes"
        if not _CLUSTER_NAME.fullmatch(self.cluster_name):
            yield (
                f"cluster-name={self.cluster_name}: expected 1 to 32 of a-z, 0-9 and '-', not '-' at the ends"
            )
