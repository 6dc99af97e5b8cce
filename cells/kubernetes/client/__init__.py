"""A client of the Kubernetes API: reads, watches, writes, and their errors."""

from __future__ import annotations

from typing import Final

from cells.kubernetes.client.access import Access
from cells.kubernetes.client.calls import Bucket
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.transport import Transport

__all__ = ["connect"]


DEFAULT: Final = 30.0
"""Seconds; the default of client-go's dialer."""


def connect(
    access: Access,
    *,
    agent: str = "hive",
    qps: float = 10.0,
    burst: int = 20,
    timeout: float = 0.0,
    keep_alive: float = 0.0,
) -> Client:
    """Return a client; it connects with its first request.

    ``timeout``: seconds to connect, and to wait for an answer. ``keep_alive``: seconds that idle connections
    stay open. 0 means 30 for both.
    """
    timeout, keep_alive = timeout or DEFAULT, keep_alive or DEFAULT
    credentials = Credentials(access)
    transport = Transport(access, credentials, connect=timeout, keep_alive=keep_alive)
    return Client(transport, credentials, Bucket(qps, burst), agent=agent, timeout=timeout)
