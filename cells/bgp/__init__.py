"""Settings of BGP: the agent announces this node's routes by a speaker process, gobgpd.

Why: routers of the network route to pods and services, which are then reachable from outside without NAT.
     gobgpd runs separately, so restarting the agent neither ends sessions nor withdraws routes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lifecycle import Settings

__all__ = ["FOLDER", "BGPSettings", "SpeakerSettings"]

FOLDER: Final = "bgp"
"""Directory of the speakers' sockets, logs and records, below state-dir."""


class BGPSettings(Settings, frozen=True):
    """Routes announced by BGP."""

    enable_bgp_control_plane: bool = False
    """Announce pod ranges, pools and addresses of services by BGP, as CiliumBGPClusterConfigs have it."""

    bgp_secrets_namespace: str = ""
    """Namespace of the Secrets that hold passwords of sessions; unset: no session has one."""

    enable_bgp_control_plane_status_report: bool = True
    """Write the state of sessions to the status of this node's CiliumBGPNodeConfig."""


class SpeakerSettings(Settings, frozen=True):
    """gobgpd, which speaks BGP."""

    bgp_speaker_path: Path | None = None
    """Path of gobgpd; unset: that of PATH, or of /usr/bin."""

    external_bgp_speaker: bool = False
    """gobgpd runs separately, as in a pod of its own: the agent starts none, and calls it over the socket
    speaker.sock in the directory bgp in state-dir, and reads why sessions ended in its log, speaker.log
    beside it. It serves one BGP instance."""

    def faults(self) -> Iterator[str]:
        if self.bgp_speaker_path is not None and not os.access(self.bgp_speaker_path, os.X_OK):
            yield f"bgp-speaker-path={self.bgp_speaker_path}: expected a program that may be run"
        if self.bgp_speaker_path is not None and self.external_bgp_speaker:
            yield (
                f"bgp-speaker-path={self.bgp_speaker_path}: external-bgp-speaker=true starts none;"
                " leave out one of the two"
            )
